"""Losses in general knowledge and language by tuning: the raw model beside the tuned one."""

import lightning as L
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng

from fedlight.callbacks.logs.trainer import log_now
from fedlight.evaluation.tasks.forgetting import QUESTIONS, TEXTS, known, perplexity
from fedlight.evaluation.tasks.model import ScoresRaw
from fedlight.processes.work import once
from fedlight.support.checks import Checked


class Forgetting(Checked, L.Callback):
    """Lightning callback that measures, after ``fit`` and in ``test``, the general knowledge of the tuned and the raw model.

    It logs ``forgetting/perplexity`` on eight short texts of everyday language and ``forgetting/knowledge``, the share of
    forty questions of common knowledge whose right answer is the likeliest of four, each with ``_raw`` for the model without
    the adapter. The texts are those of `fedlight.evaluation.tasks.forgetting`, in English.

    Raises:
        ValueError: in ``setup``, the module returns no likelihoods.
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse a module that cannot be measured before any work."""
        if not isinstance(pl_module, ScoresRaw):
            raise ValueError(
                f"Forgetting needs a module with log_likelihoods(prompts, continuations, raw), such as SFTModule, not "
                f"{type(pl_module).__name__}: take it out"
            )

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        log_now(trainer, once(lambda: measure(pl_module), forward=True))  # type: ignore[arg-type]

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.log_dict(once(lambda: measure(pl_module), forward=True))  # type: ignore[arg-type]


def measure(module: ScoresRaw) -> dict[str, float]:
    """Return perplexity and knowledge of a module's tuned and raw model, by their logged names."""
    values: dict[str, float] = {}
    right: dict[str, list[bool]] = {}
    with isolate_rng():  # the run goes on as if nothing had been measured
        for suffix, raw in (("", False), ("_raw", True)):
            texts = module.log_likelihoods([""] * len(TEXTS), [[text] for text in TEXTS], raw=raw)
            values[f"forgetting/perplexity{suffix}"] = perplexity([likelihood for [likelihood] in texts])
            endings = [[f" {choice}" for choice in question.choices] for question in QUESTIONS]
            answers = module.log_likelihoods([question.prompt for question in QUESTIONS], endings, raw=raw)
            right[suffix] = known(answers)
            values[f"forgetting/knowledge{suffix}"] = sum(right[suffix]) / len(QUESTIONS)
    lost = [
        f"{question.prompt} {question.choices[0]}"
        for question, after, before in zip(QUESTIONS, right[""], right["_raw"], strict=True)
        if before and not after
    ]
    rank_zero_info(
        f"forgetting: perplexity {values['forgetting/perplexity_raw']:.2f} raw, {values['forgetting/perplexity']:.2f} tuned"
        f"; {sum(right['_raw'])} of {len(QUESTIONS)} questions known raw, {sum(right[''])} tuned"
        + (f"; lost: {', '.join(lost)}" if lost else "")
    )
    return values
