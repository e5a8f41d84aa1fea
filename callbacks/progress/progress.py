"""Progress that names round, client, loss and the time that the run will still take; tables when it ends.

A live line in a terminal, else one line per round.
"""

import math
import time
from typing import Any, Protocol, runtime_checkable

import lightning as L
import torch
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from torch import Tensor

from fedlight.callbacks.loop.step_loss import step_loss
from fedlight.callbacks.progress.fleet_summary import fleet_summary
from fedlight.callbacks.progress.run_summary import as_page, metric_table, places, traffic
from fedlight.callbacks.progress.time_left import seconds_left
from fedlight.federation.client import Visit
from fedlight.support.words import duration

OF_A_STEP = {"train/loss", "train_loss"}
"""What modules call the loss of a batch; its mean over the round is shown instead."""


@runtime_checkable
class VisitsClients(Protocol):
    """What the bar needs of the federated loop: the visit under way, None outside of one, and on which device it is."""

    visit: Visit | None

    @property
    def device_name(self) -> str:
        """Empty where devices are not emulated."""


@runtime_checkable
class LogsVisits(Protocol):
    """What the end of a run needs of the visit log."""

    def visit_rows(self) -> list[dict[str, str]]:
        """All visits of the run, as text."""


class RoundProgress(ProgressBar):
    """Takes the place of Lightning's bar; without a federated loop it counts epochs and names no client.

    The time left is that of the whole run, from what its rounds have taken so far. Where the output is no terminal, fit
    prints a line at the end of each round, and validate, test and predict print ten lines at most: a log file of a run
    of 500 rounds has 500 lines, the tables of its end, and no control characters.

    Args:
        refresh_seconds: how often the live line is renewed, at least; reading the loss waits for the
            accelerator.
    """

    def __init__(self, refresh_seconds: float = 0.2) -> None:
        super().__init__()
        self.refresh_seconds = refresh_seconds
        self.console = Console()
        if not self.console.is_terminal:  # a file has no width, and a narrow table cuts its words
            self.console = Console(width=200)
        self._enabled = True
        self._live: Progress | None = None
        self._task = TaskID(0)
        self._losses: list[Tensor] = []
        self._started = self._shown = time.monotonic()
        self._rounds: list[float] = []  # seconds of each, from its start to the next one's
        self._rounds_after: int | None = 0
        self._history: dict[int, dict[str, float]] = {}

    def enable(self) -> None:
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        loops = [callback for callback in callbacks if isinstance(callback, VisitsClients)]
        self._loop: VisitsClients | None = loops[0] if loops else None
        self._rounds, self._rounds_after, self._history = [], 0, {}

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Ends a fit with its tables: all that it leaves is written by now."""
        self._stop()
        if stage == "fit" and self._history and self._enabled:
            self._summarize(trainer)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self._stop()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints above the live line."""
        self.console.print(*args, **kwargs)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._fit_started = time.monotonic()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._history:
            self._rounds.append(time.monotonic() - self._started)
        self._losses = []
        self._client = ""
        last = trainer.max_epochs
        self._rounds_after = None if last in (None, -1) else last - trainer.current_epoch - 1
        self._begin(self._round_name(trainer), self.total_train_batches)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._loop is not None and self._loop.visit is not None:
            device = self._loop.device_name
            self._client = f"client {self._loop.visit.client_id}{f' on {device}' if device else ''}"
        if (loss := step_loss(trainer, outputs)) is not None:
            self._losses.append(loss)
        if self._is_due(batch_idx + 1):
            last = f"loss {self._losses[-1].item():.4f}" if self._losses else ""
            self._show(batch_idx + 1, f"{self._client}  {last}".strip())

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        shown = {"loss": torch.stack(self._losses).mean().item()} if self._losses else {}
        metrics = trainer.progress_bar_metrics
        shown |= {name: float(value) for name, value in metrics.items() if name not in OF_A_STEP}
        self._history[trainer.current_epoch + 1] = shown
        values = "  ".join(f"{name} {value:.4f}" for name, value in shown.items())
        seconds = time.monotonic() - self._started
        left = self._left([*self._rounds, seconds], elapsed=math.inf) if self._rounds_after else ""
        self._say(f"{self._round_name(trainer)}: {values}  ({seconds:.1f} s{f', {left}' if left else ''})")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stop()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "validate":
            self._begin("validate", sum(trainer.num_val_batches))
        elif self._live is not None:
            self._live.update(self._task, completed=self._total, note="validation")

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if trainer.state.fn == "validate":
            self._count("validate")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "validate":  # Lightning prints its table of results next
            self._stop()

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begin("test", sum(trainer.num_test_batches))

    def on_test_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._count("test")

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stop()

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begin("predict", sum(trainer.num_predict_batches))

    def on_predict_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._count("predict")

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stop()

    def _round_name(self, trainer: L.Trainer) -> str:
        unit = "epoch" if self._loop is None else "round"
        return f"{unit} {trainer.current_epoch + 1}/{trainer.max_epochs}"

    def _begin(self, name: str, total: float) -> None:
        """A new line for ``total`` batches; the live display is started by the first."""
        self._started = self._shown = time.monotonic()
        self._done, self._total = 0, total
        if not self._enabled or not self.console.is_terminal:
            return
        if self._live is None:
            self._live = _live_line(self.console)
            self._task = self._live.add_task(name, total=total, note="", left="")
            self._live.start()
        self._live.reset(self._task, description=name, total=total, note="", left=self._left(self._rounds))

    def _is_due(self, done: int) -> bool:
        """Is it time to renew the live line? With the last batch it always is, so that it does not end at 29/30."""
        if self._live is None:
            return False
        return done >= self._total or time.monotonic() - self._shown >= self.refresh_seconds

    def _show(self, done: int, note: str) -> None:
        assert self._live is not None
        self._shown = time.monotonic()
        left = self._left(self._rounds, done / self._total, self._shown - self._started)
        self._live.update(self._task, completed=done, note=note, left=left)

    def _left(self, rounds: list[float], share: float = 0.0, elapsed: float = 0.0) -> str:
        """The time that the run, or the pass over the data, will still take; empty where it is not known or over."""
        if self._rounds_after is None:
            return ""
        seconds = round(seconds_left(rounds, elapsed, share, self._rounds_after) or 0)
        return f"{duration(seconds)} left" if seconds else ""

    def _count(self, name: str) -> None:
        """One more batch of validate, test or predict."""
        self._done += 1
        if self._is_due(self._done):
            self._show(self._done, "")
        elif self._live is None and self._done * 10 // self._total > (self._done - 1) * 10 // self._total:
            self._say(
                f"{name}: {self._done}/{self._total} batches  ({time.monotonic() - self._started:.1f} s)"
            )

    def _say(self, line: str) -> None:
        if self._enabled:
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _summarize(self, trainer: L.Trainer) -> None:
        """Metrics, what was sent or what the devices did, and where it all lies."""
        unit = "epoch" if self._loop is None else "round"
        seconds = time.monotonic() - self._fit_started
        self.console.print(metric_table(self._history, unit, seconds))
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        rows = [row for log in callbacks if isinstance(log, LogsVisits) for row in log.visit_rows()]
        if rows and "device" in rows[0]:
            self.console.print(fleet_summary(rows))
        elif rows:
            self._say(traffic(rows))
        for line in filter(None, (places(trainer), as_page(trainer))):
            self._say(line)

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def _live_line(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}", markup=False),
        TextColumn("{task.fields[note]}", markup=False),
        console=console,
        transient=True,
    )
