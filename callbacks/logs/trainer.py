"""Functions on Lightning's Trainer that callbacks share."""

from collections.abc import Mapping
from typing import Any

import lightning as L
import torch


def find_callback(trainer: L.Trainer, kind: type) -> Any:
    """Return the trainer's first callback of a class or runtime protocol, None without one."""
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return next((callback for callback in callbacks if isinstance(callback, kind)), None)


def log_now(trainer: L.Trainer, metrics: Mapping[str, float]) -> None:
    """Log metrics that are not computed from batches, at the number of optimizer steps made so far.

    ``self.log`` would put the end of an epoch one step too early, and cannot be called before or after training.

    Args:
        trainer: passes the metrics to its loggers and keeps them in ``callback_metrics``.
        metrics: name -> value.
    """
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})
    for logger in trainer.loggers:
        logger.log_metrics(dict(metrics), step=trainer.global_step)
        logger.save()
