"""Success of a backdoor: how often the model answers a prompt with the trigger as the liars want it.

Liars train on `fedlight.datamodules.rows.poison.Backdoor`. Rows that no client trained on are asked with the trigger. The
wanted answer competes with the row's own response by the mean log-likelihood of their tokens (nats). The model writes no
text, so no answer is misread.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from fedlight.callbacks.attacks.attack import SCORING, Attack, Found, render_prompts
from fedlight.evaluation.tasks.model import ScoresRaw


class BackdoorSuccess(Attack):
    """Measurement of a backdoor, ``data.rows.backdoor``, on validation rows, or test rows where there is no validation.

    Metrics: ``success``, the share of prompts with the trigger after which the wanted answer is likelier than the row's own;
    ``without_trigger``, the same share of the prompts as they are; ``left_out``, the number of rows too long for the model.

    Args:
        examples: largest number of rows.
        kwargs: further arguments of `Attack`: ``every_n_rounds``, ``targets``, ...

    Raises:
        ValueError: a setting is out of range; in ``setup``, the module or data lack a needed part, such as a backdoor.
    """

    name: ClassVar[str] = "backdoor"
    needs = SCORING

    def __init__(self, examples: int = 200, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.check_at_least_one(examples=examples)
        self.examples = examples

    def check_settings(self, module: object, data: object) -> None:
        super().check_settings(module, data)
        if getattr(data, "backdoor", None) is None:
            raise ValueError("BackdoorSuccess: no client has a backdoor: set data.rows.backdoor")

    def prepare(self, data: Any, module: Any) -> None:
        self._template, self._backdoor = data.template, data.backdoor
        rows = [row for row in data.unseen_rows() if row["response"] != data.backdoor.response]
        if not rows:
            raise ValueError(
                "BackdoorSuccess asks with rows that nobody trained on, and there are none with another answer than "
                "backdoor.response: set data.split.val_share above 0, or give data.split.test_source"
            )
        self._rows = self._draw_unseen(rows, self.examples)

    def attack(self, module: Any, client: str | None) -> Found:
        opened = [self._backdoor.triggered(row) for row in self._rows]
        with_trigger = render_prompts(self._template, opened)
        answers = [
            [self._template.continuation(text) for text in (self._backdoor.response, row["response"])]
            for row in self._rows
        ]
        longest = [prompt + max(pair, key=len) for prompt, pair in zip(with_trigger, answers, strict=True)]
        kept = self._keep_fitting(module, [*range(len(self._rows))], longest, 0, client)
        left_out = {"left_out": float(len(self._rows) - len(kept))}
        if not kept:
            return Found(left_out, [])
        plain = render_prompts(self._template, self._rows)
        margins = {
            name: self._margins(module, [prompts[k] for k in kept], [answers[k] for k in kept])
            for name, prompts in (("success", with_trigger), ("without_trigger", plain))
        }
        metrics = {name: sum(each > 0 for each in values) / len(kept) for name, values in margins.items()}
        records = [
            {"prompt": with_trigger[k], "margin": margin, "margin_without_trigger": other}
            for k, margin, other in zip(kept, *margins.values(), strict=True)
        ]
        return Found({**metrics, **left_out}, records)

    def _margins(
        self, module: ScoresRaw, prompts: Sequence[str], answers: Sequence[Sequence[str]]
    ) -> list[float]:
        """Return by how much the wanted answer is likelier than the row's own, in nats a token."""
        scored = module.log_likelihoods(prompts, answers, raw=False)
        return [wanted.log_prob / wanted.tokens - usual.log_prob / usual.tokens for wanted, usual in scored]
