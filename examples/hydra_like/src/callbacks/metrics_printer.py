"""A line for each epoch."""

import lightning as L


class MetricsPrinter(L.Callback):
    """Prints some metrics at the end of each validation.

    Args:
        metrics: their names.

    Attributes:
        lines: the printed ones.
    """

    def __init__(self, metrics: list[str]) -> None:
        self.metrics = metrics
        self.lines: list[str] = []

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Prints those that are there."""
        metrics = {
            name: trainer.callback_metrics[name] for name in self.metrics if name in trainer.callback_metrics
        }
        values = "  ".join(f"{name} {value.item():.3f}" for name, value in metrics.items())
        self.lines.append(f"epoch {trainer.current_epoch}: {values}")
        print(self.lines[-1])
