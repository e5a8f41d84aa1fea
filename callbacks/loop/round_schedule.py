"""Where in a round's stream of batches each visit begins and ends; and a round that has none."""

import math
import warnings
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import rank_zero_info

from fedlight.federation.client import Visit
from fedlight.federation.protocols import NumBatches


class RoundSchedule:
    """The visits of one round, one after the other.

    Args:
        visits: in the order in which they are trained.
        accumulation: batches of an optimizer step.

    Attributes:
        accumulation: batches of an optimizer step.
        begins: number of its first batch -> visit.
        ends: numbers of the batches before which a visit has ended.
        num_batches: of the whole round; those of one optimizer step where there is no visit, as Lightning needs some.

    Raises:
        ValueError: a visit ends inside an optimizer step.

    Example:
        >>> schedule = RoundSchedule([Visit("a", 2), Visit("b", 3)], accumulation=1)
        >>> list(schedule.begins), sorted(schedule.ends), schedule.num_batches
        ([0, 2], [2, 5], 5)
    """

    def __init__(self, visits: Sequence[Visit], accumulation: int) -> None:
        self.accumulation = accumulation
        for visit in visits:
            if visit.num_batches % accumulation:
                raise ValueError(
                    f"a visit of {visit.num_batches} batches is no multiple of trainer.accumulate_grad_batches="
                    f"{accumulation}: one optimizer step would mix two clients"
                )
        ends = list(accumulate(visit.num_batches for visit in visits))
        self.begins = dict(zip([0, *ends[:-1]], visits, strict=True)) if visits else {}
        self.ends = set(ends)
        self._last = {visit.client_id: visit for visit in visits}
        self._first = {visit.client_id: visit for visit in reversed(visits)}
        self.num_batches = ends[-1] if ends else accumulation

    def is_first(self, visit: Visit) -> bool:
        """Whether it is the first of its client in the round."""
        return self._first[visit.client_id] is visit

    def is_last(self, visit: Visit) -> bool:
        """Whether it is the last of its client in the round."""
        return self._last[visit.client_id] is visit


def batches_per_step(trainer: L.Trainer, round_idx: int) -> int:
    """Batches of an optimizer step in a round, which Lightning's ``GradientAccumulationScheduler`` may change with it."""
    number = trainer.accumulate_grad_batches
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler):
            number = callback.get_accumulate_grad_batches(round_idx)
    return number


def visit_lengths(local_steps: int | None, accumulation: int, one_pass: NumBatches) -> NumBatches:
    """How many batches a visit has, by client id and which of its data it trains on.

    Args:
        local_steps: optimizer steps; None for one pass over the client's data, cut to whole steps.
        accumulation: batches of an optimizer step.
        one_pass: batches of a pass, by the same.

    Example:
        >>> visit_lengths(None, 2, lambda client_id, split="train": 5)("a")
        4
    """

    def num_batches(client_id: str, split: str = "train") -> int:
        steps = local_steps or max(1, one_pass(client_id, split) // accumulation)
        return steps * accumulation

    return num_batches


def number_asked(wanted: int, over_selection: float) -> int:
    """So many clients are asked for ``wanted`` of them.

    Example:
        >>> number_asked(100, 1.1), number_asked(8, 1.3)
        (110, 11)
    """
    return math.ceil(round(wanted * over_selection, 9))


def takes_place(trainer: L.Trainer, round_idx: int) -> bool:
    """Whether the round will be trained, as far as is known: not after the last, nor where the trainer was told to stop."""
    stops = trainer.should_stop and trainer.fit_loop._can_stop_early
    return round_idx < (trainer.max_epochs or 0) and not stops


def skip_batches(module: L.LightningModule, round_idx: int) -> None:
    """Has the module train nothing, until :func:`train_batches_again`, and says so.

    Lightning stops the whole run at an epoch without batches. So a round without visits has some, which are passed over; the
    round is validated, logged and counted like any other.
    """
    rank_zero_info(f"round {round_idx + 1}: nobody is left of those asked, so the model stays as it is")
    warnings.filterwarnings("ignore", "`training_step` returned `None`")
    module.training_step = _skip  # type: ignore[method-assign]


def train_batches_again(module: L.LightningModule) -> None:
    """Undoes :func:`skip_batches`, where that was done."""
    if vars(module).get("training_step") is _skip:
        del module.training_step


def _skip(*_: object) -> None:
    """A training step that has Lightning go on to the next batch."""


def close_epoch(trainer: L.Trainer) -> None:
    """Has Lightning go on behind the batches of an epoch of which a checkpoint was taken after validation.

    It compares how many it had done with how many the next epoch has, and so would train a part of a longer round.
    """
    done: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    done.ready = done.started = done.processed = done.completed = int(trainer.num_training_batches)
