"""Win rate during training: after an epoch the model's answers are compared with those of the untuned model.

A model tuned on a judge's labels comes to please that judge; only another judge can show whether its answers become better.
Where the two differ, the model has learned the judge's errors (Gao, Schulman and Hilton, "Scaling Laws for Reward Model
Overoptimization", ICML 2023, https://arxiv.org/abs/2210.10760).
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng

from fedlight.callbacks.logs.trainer import find_callback, log_now
from fedlight.callbacks.logs.visit_log import RecordsVisits
from fedlight.evaluation.bootstrap import bootstrap_interval
from fedlight.evaluation.equal_length import Compared, rates_at_equal_length
from fedlight.evaluation.judge import BothPositions, Judge
from fedlight.evaluation.tasks.sampling import Sampling
from fedlight.processes.work import for_each, once
from fedlight.support.checks import Checked, refuse_below
from fedlight.support.seeding import derive_seed
from fedlight.support.types import Fields


class WinRate(Checked, L.Callback):
    """Lightning callback that logs how often each judge prefers the tuned model's answers to the raw model's.

    A tie counts one half. Each pair is shown in both orders where the order can matter. Logs ``win_rate/NAME`` for each
    judge, the ends of its 95 % interval as ``win_rate_low/NAME`` and ``win_rate_high/NAME`` (bootstrap over prompts),
    ``win_rate_equal_length/NAME``, the win rate at equal length (`fedlight.evaluation.equal_length`),
    ``win_rate_unread/NAME``, the share of pairs without a readable verdict, which are left out, and ``win_rate/words``, the
    number of words of all answers relative to the raw ones. It logs before training and after each n-th epoch, at the number
    of optimizer steps made so far. Both models draw with the same seeds in every epoch, so only the model changes. Training
    continues as if nothing had been measured. Checkpoints hold the raw answers for resumed runs.

    Args:
        prompts: datamodule whose ``predict_dataloader`` gives batches with ``prompt`` (rendered texts) and ``fields``, such
            as a ``PromptDataModule``; other prompts than those of the training pairs.
        judges: name under which it is logged -> judge.
        every_n_epochs: at least 1.
        temperature: temperature of the answers, at least 0; 0 is greedy.
        max_new_tokens: largest number of tokens in an answer, at least 1.
        seed: seed of the answers.

    Raises:
        ValueError: a setting is out of range; in ``setup``, the module writes no text or there are several processes;
            before training, a checkpoint has answers to other prompts or from other sampling settings.
    """

    def __init__(
        self,
        prompts: L.LightningDataModule,
        judges: dict[str, Judge],
        every_n_epochs: int = 1,
        temperature: float = 0.7,
        max_new_tokens: int = 40,
        seed: int = 0,
    ) -> None:
        refuse_below(1, "WinRate.", every_n_epochs=every_n_epochs)
        if not judges or "words" in judges:
            raise ValueError(
                f"WinRate.judges={list(judges)}: name one or more; `words` is the name of a metric already"
            )
        Sampling(temperature, max_new_tokens=max_new_tokens)  # raises for settings out of range
        self.prompts, self.judges, self.every_n_epochs = prompts, judges, every_n_epochs
        self.temperature, self.max_new_tokens, self.seed = temperature, max_new_tokens, seed
        self._raw: list[str] = []
        self._fingerprint = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if trainer.world_size > 1:
            raise ValueError("WinRate writes its answers in one process: set devices=1 and num_nodes=1")
        if not hasattr(pl_module, "generate"):
            raise ValueError(
                f"WinRate needs a module with generate(prompts, ..., raw), such as DPOModule or SFTModule, not "
                f"{type(pl_module).__name__}"
            )
        with isolate_rng():  # a datamodule may draw
            self.prompts.prepare_data()
            self.prompts.setup("predict")
            batches = list(self.prompts.predict_dataloader())
        self._batches: list[Sequence[str]] = [batch["prompt"] for batch in batches]
        self._stop: Sequence[str] = batches[0].get("stop", ()) if batches else ()
        self._fields: list[Fields] = [fields for batch in batches for fields in batch["fields"]]
        if not self._fields:
            raise ValueError("WinRate.prompts gives no prompt to answer: give it rows, or take WinRate out")
        if trainer.current_epoch == 0:  # a checkpoint is loaded later
            self._raw = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the raw answers and log the first win rate; a resumed run has both."""
        prompts = [prompt for batch in self._batches for prompt in batch]
        fingerprint = derive_seed(str(self.temperature), self.max_new_tokens, self.seed, *prompts)
        if self._raw and fingerprint != self._fingerprint:
            raise ValueError(
                "WinRate: the raw answers in the checkpoint are to other prompts, or were drawn with another temperature, "
                "max_new_tokens or seed: give those of the run that is resumed, or begin anew"
            )
        if not self._raw:
            self._raw, self._fingerprint = self._answers(pl_module, raw=True), fingerprint
            self._measure(trainer, pl_module, "before training")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        loop: RecordsVisits | None = find_callback(trainer, RecordsVisits)
        # ``max_time`` cuts a round.
        is_cut = loop is not None and loop.rounds_done == trainer.current_epoch
        if (trainer.current_epoch + 1) % self.every_n_epochs == 0 and not is_cut:
            self._measure(trainer, pl_module, f"epoch {trainer.current_epoch + 1}")

    def state_dict(self) -> dict[str, Any]:
        """Return the raw model's answers, and a number that depends on the prompts and the sampling settings."""
        return {"raw": self._raw, "made_for": self._fingerprint}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._raw, self._fingerprint = state_dict["raw"], state_dict["made_for"]

    def _answers(self, module: Any, raw: bool) -> list[str]:
        drawn = {"temperature": self.temperature, "max_new_tokens": self.max_new_tokens, "stop": self._stop}

        def answer(prompts: Sequence[str]) -> list[str]:
            seed = derive_seed(self.seed, "win rate", *prompts)  # only the model changes from epoch to epoch
            return [texts[0] for texts in module.generate(prompts, seed=seed, raw=raw, **drawn)]

        with isolate_rng():
            return [text for texts in for_each(answer, self._batches) for text in texts]

    def _measure(self, trainer: L.Trainer, module: L.LightningModule, when: str) -> None:
        answers = self._answers(module, raw=False)
        with isolate_rng():  # a judge may load a model, whose weights are drawn before they are read
            # Once, because a judge may cost money.
            rated = {
                name: once(partial(BothPositions(judge).scores, self._fields, answers, self._raw))
                for name, judge in self.judges.items()
            }
        rates = {name: self._rates(scores, answers) for name, scores in rated.items()}
        metrics = {
            f"{metric}/{name}": value for name, numbers in rates.items() for metric, value in numbers.items()
        }
        metrics["win_rate/words"] = word_ratio(answers, self._raw)
        log_now(trainer, metrics)
        shown = "  ".join(
            f"{name} {value:.4f}" for name, value in metrics.items() if name.startswith("win_rate/")
        )
        rank_zero_info(f"{when}, against the raw model on {len(answers)} prompts: {shown}")

    def _rates(self, scores: Sequence[float], answers: Sequence[str]) -> dict[str, float]:
        """Return the win rate, its interval, the rate at equal length and the share unread, without undefined ones."""
        read = [score for score in scores if not math.isnan(score)]
        low, high = bootstrap_interval(scores, seed=self.seed)
        longer = [len(ours.strip()) - len(raw.strip()) for ours, raw in zip(answers, self._raw, strict=True)]
        compared = Compared(scores, longer, range(len(scores)))
        rates = {
            "win_rate": math.fsum(read) / len(read) if read else math.nan,
            "win_rate_low": low,
            "win_rate_high": high,
            "win_rate_equal_length": rates_at_equal_length({"tuned": compared})["tuned"].corrected,
            "win_rate_unread": 1 - len(read) / len(scores),
        }
        return {name: value for name, value in rates.items() if not math.isnan(value)}  # of too few prompts


def word_ratio(ours: Sequence[str], theirs: Sequence[str]) -> float:
    """Return the number of words of all our answers over that of theirs; NaN where theirs have none.

    Examples:
        >>> word_ratio(["a b", "c"], ["a b", "c d e f"])
        0.5
    """
    words, others = (sum(len(text.split()) for text in texts) for texts in (ours, theirs))
    return words / others if others else math.nan
