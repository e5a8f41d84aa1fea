"""Functions on Lightning's Trainer that callbacks share."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import lightning as L
import torch
from lightning.pytorch.callbacks import Timer

from fedlight.callbacks.loop.round_table import Record
from fedlight.federation.client import State


@runtime_checkable
class KeepsOwnModels(Protocol):
    """Federated loop that knows its clients' own models, with a row in ``visit_records`` for each visit of the round."""

    clients: Mapping[str, Any]
    visit_records: list[Record]

    def own_state(self, client_id: str) -> State | None:
        """Return the parameters that a client would continue to train alone; None for the global ones."""


def find_callback(trainer: L.Trainer, kind: type) -> Any:
    """Return the trainer's first callback of a class or runtime protocol, None without one."""
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return next((callback for callback in callbacks if isinstance(callback, kind)), None)


def timers(trainer: L.Trainer) -> list[Timer]:
    """Return the callbacks that end a run by the clock, as ``trainer.max_time`` makes one."""
    return [callback for callback in trainer.callbacks if isinstance(callback, Timer)]  # type: ignore[attr-defined]


def is_out_of_time(trainer: L.Trainer) -> bool:
    """Return whether the clock ends the run."""
    left = [timer.time_remaining() for timer in timers(trainer)]
    return any(seconds is not None and seconds <= 0 for seconds in left)


def find_own_models(trainer: L.Trainer, owner: str) -> KeepsOwnModels:
    """Return the trainer's federated loop; raise ValueError without one, naming the setting of ``owner``."""
    loop: KeepsOwnModels | None = find_callback(trainer, KeepsOwnModels)
    if loop is None:
        raise ValueError(f"{owner}.own_models=true needs clients: add a federated loop, or leave it at false")
    return loop


def log_now(trainer: L.Trainer, metrics: Mapping[str, float]) -> None:
    """Log metrics that are not computed from batches, to loggers and ``callback_metrics``, at the present optimizer step."""
    # self.log would put the end of an epoch one step too early, and is refused before and after training.
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})
    for logger in trainer.loggers:
        logger.log_metrics(dict(metrics), step=trainer.global_step)
        logger.save()
