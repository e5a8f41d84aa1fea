"""Metrics that a stopped run has logged, for the command that goes on with it."""

from typing import Any

import lightning as L

KEY = "fedlight_metrics"


class KeptMetrics(L.Callback):
    """Lightning callback that keeps ``callback_metrics`` in checkpoints.

    Lightning forgets them when a run is resumed, and tables of recipes and model cards would lack each metric that is not
    logged again: the last rounds may group no clients, and after the last checkpoint there is no round left.
    """

    def __init__(self) -> None:
        self._before: dict[str, Any] = {}

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint[KEY] = {name: value.cpu() for name, value in trainer.callback_metrics.items()}

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._before = checkpoint.get(KEY, {})

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.callback_metrics.update(self._before)  # only now: Lightning has emptied them meanwhile
