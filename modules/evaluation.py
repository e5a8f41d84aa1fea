"""Validation and test batches that the processes of a team share.

Before a pass each process computes its batches and all gather the results; then Lightning's loop goes over all batches in
each process, where a step takes its result instead of computing it. So logged values and their rounding are those of one
process, and callbacks see every step.
"""

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import lightning as L
from torch import Tensor
from torch.utils.data import DataLoader, SequentialSampler

from fedlight.processes.team import current_team
from fedlight.processes.work import for_each
from fedlight.support.pokes import batch_before_transfer, batch_on_device

Results = deque[tuple[int, dict[str, Tensor]]]
"""Results of the batches of a pass that are still to come, on the CPU, in order, each with the key of its batch."""


def evaluate_together(module: Any, stage: str) -> Results:
    """Return the results of all batches of the pass that begins, ``val`` or ``test``; none where each step computes its own.

    That is so in a single process, and for loaders that shuffle.
    """
    trainer: L.Trainer = module.trainer
    if current_team().size == 1:
        return deque()
    loaders: Any = trainer.val_dataloaders if stage == "val" else trainer.test_dataloaders
    loaders = loaders if isinstance(loaders, list) else [loaders]
    if not all(
        isinstance(loader, DataLoader) and isinstance(loader.sampler, SequentialSampler) for loader in loaders
    ):
        return deque()
    plugin = trainer.precision_plugin
    context = plugin.val_step_context if stage == "val" else plugin.test_step_context

    def evaluate(batch: Any) -> tuple[int, dict[str, Tensor]]:
        key = module.batch_key(batch)
        batch = batch_before_transfer(module, plugin.convert_input(batch))
        with context():  # as in Lightning's loop
            results = module.evaluation(batch_on_device(module, batch))
        return key, {name: values.detach().cpu() for name, values in results.items()}

    return deque(for_each(evaluate, _batches(loaders, _limits(trainer, stage))))


def _limits(trainer: L.Trainer, stage: str) -> list[int | float]:
    if trainer.sanity_checking:
        return trainer.num_sanity_val_batches
    return trainer.num_val_batches if stage == "val" else trainer.num_test_batches


def _batches(loaders: list[DataLoader], limits: list[int | float]) -> Iterator[Any]:
    for loader, limit in zip(loaders, limits, strict=True):
        batches = islice(loader, None if limit == float("inf") else int(limit))
        yield from (batch for batch in batches if batch)  # that of tasks without a loss is empty
