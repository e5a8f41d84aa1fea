"""Membership inference: do the model's losses tell the clients' training rows from rows that nobody trained on?

The score is the loss of a response over its loss under the raw model, that is, with the adapter off; who proposed it and
how it is judged is said in :mod:`fedlight.evaluation.membership`. The papers on FedDCA and FewFedPIT have no such attack.
"""

import random
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from lightning.pytorch.utilities import rank_zero_info

from fedlight.callbacks.attacks.attack import Attack, Found
from fedlight.callbacks.attacks.attack_needs import HoldsClientRows, ending, prompts_of, without_planted
from fedlight.evaluation.extraction import round_robin
from fedlight.evaluation.membership import loss_ratios, membership_metrics
from fedlight.evaluation.tasks.model import KnowsWhatFits, Likelihood
from fedlight.support.seeding import derive_seed


@runtime_checkable
class ScoresTexts(Protocol):
    """What is needed of the module."""

    def log_likelihoods(
        self, prompts: Sequence[str], continuations: Sequence[Sequence[str]], raw: bool
    ) -> list[list[Likelihood]]:
        """How likely each continuation is; ``raw`` as the model was before it was tuned."""


class Candidate(NamedTuple):
    """A text of which is asked whether it was trained on.

    Attributes:
        member: whether it was.
        client: by whom; empty where by nobody.
        prompt: rendered.
        response: whose loss counts.
    """

    member: bool
    client: str
    prompt: str
    response: str


class MembershipInference(Attack):
    """Guesses from its losses which rows the model was trained on.

    Members are training rows of different clients in turn, of an upload that client's own, without planted canaries; the
    others are validation rows, or test rows where there is no validation: the nearer these are to the members in kind, the
    more the result says. Metrics: ``auc`` of the loss ratio (chance: 0.5), ``tpr_at_0.01_fpr`` and ``tpr_at_0.1_fpr``,
    ``loss_auc``, the AUC of the loss alone, and ``left_out``, the number of rows that do not fit into the model.

    Args:
        examples: most members, and most others.
        kwargs: further arguments of :class:`~fedlight.callbacks.attacks.attack.Attack`: ``every_n_rounds``, ``targets``, ...

    Raises:
        ValueError: a setting is out of range; in ``setup``, what is needed is not there, or there are no members or no
            others.
    """

    name: ClassVar[str] = "membership_inference"

    def __init__(
        self,
        examples: int = 200,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.at_least_one(examples=examples)
        self.examples = examples

    def prepare(self, data: HoldsClientRows, module: Any) -> None:
        if not isinstance(module, ScoresTexts) or not isinstance(module, KnowsWhatFits):
            raise ValueError(
                "MembershipInference needs a module with log_likelihoods and fits, such as SFTModule, not "
                f"{type(module).__name__}"
            )
        self._template, self._rows = data.template, without_planted(data)
        unseen = list(data.unseen_rows())
        if not unseen or not any(self._rows.values()):
            raise ValueError(
                "MembershipInference compares training rows with rows that nobody trained on, and there are none: set "
                "data.val_share above 0, or give a test_source"
                if not unseen
                else "MembershipInference: no client has a row besides canaries, so there are no members"
            )
        drawn = random.Random(derive_seed(self.seed, self.name)).sample(unseen, len(unseen))
        self._unseen = drawn[: self.examples]
        self._said: set[str | None] = set()
        self._references: dict[str | None, list[float]] = {}

    def attack(self, module: Any, client: str | None) -> Found:
        texts = self._texts(client)
        kept = self._fitting(module, texts, client)
        left_out = {"left_out": float(len(texts) - len(kept))}
        members = sum(text.member for text in kept)
        if not 0 < members < len(kept):
            return Found(left_out, [])
        losses = self._losses(module, kept, raw=False)
        # The raw model stays what it is. By target, since in other batches the same text is rounded otherwise.
        if client not in self._references:
            self._references[client] = self._losses(module, kept, raw=True)
        references = self._references[client]
        ratios = loss_ratios(losses, references).tolist()
        metrics = membership_metrics(ratios[:members], ratios[members:])
        metrics["loss_auc"] = membership_metrics(losses[:members], losses[members:])["auc"]
        records = [
            {**text._asdict(), "loss": loss, "reference": reference, "ratio": ratio}
            for text, loss, reference, ratio in zip(kept, losses, references, ratios, strict=True)
        ]
        return Found({**metrics, **left_out}, records)

    def _texts(self, client: str | None) -> list[Candidate]:
        """Members, and the others behind them."""
        own = self._rows if client is None else {client: self._rows[client]}
        members = round_robin(own, self.examples, derive_seed(self.seed, self.name))
        rows = [*members, *(("", row) for row in self._unseen)]
        prompts = prompts_of(self._template, [row for _, row in rows])
        return [
            Candidate(at < len(members), owner, prompt, row["response"])
            for at, ((owner, row), prompt) in enumerate(zip(rows, prompts, strict=True))
        ]

    def _fitting(
        self, module: KnowsWhatFits, texts: Sequence[Candidate], client: str | None
    ) -> list[Candidate]:
        fits = module.fits([text.prompt + ending(text.prompt, text.response) for text in texts], 0)
        kept = [text for text, fit in zip(texts, fits, strict=True) if fit]
        if len(kept) < len(texts) and client not in self._said:
            self._said.add(client)
            rank_zero_info(
                f"{self.name}: {len(texts) - len(kept)} of {len(texts)} rows are left out: they do not fit into the model"
            )
        return kept

    @staticmethod
    def _losses(module: ScoresTexts, texts: Sequence[Candidate], raw: bool) -> list[float]:
        """Mean token loss of each response, in nats."""
        endings = [[ending(text.prompt, text.response)] for text in texts]
        found = module.log_likelihoods([text.prompt for text in texts], endings, raw=raw)
        return [-one.log_prob / one.tokens for [one] in found]
