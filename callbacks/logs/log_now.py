"""Metrics of what no pass over batches is behind: before training, at a round's end, after the last round."""

from collections.abc import Mapping

import lightning as L
import torch


def log_now(trainer: L.Trainer, metrics: Mapping[str, float]) -> None:
    """Gives metrics to the loggers at the number of optimizer steps made so far, and to recipes and scripts.

    Not by ``self.log``: it would put epoch ends one step too early, and takes nothing before or after training.

    Args:
        trainer: whose loggers; its ``callback_metrics`` have the values, too.
        metrics: by name.
    """
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})
    for logger in trainer.loggers:
        logger.log_metrics(dict(metrics), step=trainer.global_step)
        logger.save()
