"""Progress of a run by round, client, loss and time left, live or in one line per round, and tables at its end."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import lightning as L
import torch
from lightning.pytorch.callbacks import ProgressBar
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from torch import Tensor

from fedlight.callbacks.logs.trainer import find_callback
from fedlight.callbacks.logs.visit_log import RecordsVisits, VisitLog
from fedlight.callbacks.loop.round_table import Record
from fedlight.callbacks.loop.visits.visit import step_losses
from fedlight.callbacks.progress.run_summary import (
    MetricEnds,
    device_table,
    output_paths,
    report_command,
    traffic,
)
from fedlight.callbacks.progress.time_left import TimeLeft, works_between_rounds
from fedlight.devices import hardware
from fedlight.devices.outcomes import took_part
from fedlight.federation.client import Visit
from fedlight.support.checks import Checked, check_range
from fedlight.support.console import wide_console
from fedlight.support.files import quoted
from fedlight.support.words import count_noun, in_largest_unit

FORETOLD_AFTER, MINUTE = 20, 60
"""Seconds after which a fit says what it takes, and the least that is worth saying."""
BEFORE_ITS_END = 1 - 1e-9
"""Share of a round whose last batch is done, but not its end: a validation may follow."""
STEP_LOSSES = {"train/loss", "train_loss"}
"""Names of a batch's loss in modules; the bar shows its mean over the round instead."""


@runtime_checkable
class VisitsClients(Protocol):
    """Federated loop with the visits under way."""

    @property
    def visits(self) -> list[Visit]:
        """Visits that are trained side by side, none outside of a group."""

    @property
    def device_name(self) -> str:
        """Name of the first visit's device, empty without a fleet."""


class RoundProgress(Checked, ProgressBar):
    """Progress bar of rounds, in place of Lightning's; without a federated loop it counts epochs and names no client.

    The time left is that of the whole run, estimated from its finished rounds. Where the output is not a terminal, fit
    prints a line at the end of each round, and validate, test and predict print at most ten lines. So a log file of 500
    rounds has 500 lines, the tables of the end, and no control characters.

    Args:
        refresh_seconds: shortest time between two updates of the live line, at least 0; reading the loss waits for the
            accelerator.

    Raises:
        ValueError: ``refresh_seconds`` is out of range.
    """

    def __init__(self, refresh_seconds: float = 0.2) -> None:
        check_range("RoundProgress.refresh_seconds", refresh_seconds, 0, math.inf)
        super().__init__()
        self.refresh_seconds = refresh_seconds
        self.console = wide_console()
        self._enabled = True
        self._live: Progress | None = None
        self._task = TaskID(0)
        self._losses: list[Tensor] = []
        self._started = self._shown = time.monotonic()
        self._time_left = TimeLeft()
        self._rounds_after: int | None = 0
        self._validations_left = 0
        self._metrics = MetricEnds()

    def enable(self) -> None:
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._loop: VisitsClients | None = find_callback(trainer, VisitsClients)
        self._records: RecordsVisits | None = find_callback(trainer, RecordsVisits)
        self._time_left, self._rounds_after, self._validations_left = TimeLeft(), 0, 0
        self._metrics = MetricEnds()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Print the tables of a fit; all its files are written by now."""
        self._stop()
        if stage == "fit" and self._metrics and self._enabled:
            self._summarize(trainer)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self._stop()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print above the live line."""
        self.console.print(*args, **kwargs)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._fit_started = time.monotonic()
        self._tokens: list[int] = []
        self._foretold = False

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._losses = []
        self._client = ""
        last = trainer.max_epochs
        self._rounds_after = None if last in (None, -1) else last - trainer.current_epoch - 1
        self._validations_left = _validations(trainer, trainer.current_epoch)
        self._begin(self._round_name(trainer), self.total_train_batches)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._time_left.batch_ends()
        if self._loop is not None and (visits := self._loop.visits):
            self._client = name_clients([visit.client_id for visit in visits], self._loop.device_name)
            self._client += model_age(visits, trainer.current_epoch)
        if (losses := step_losses(trainer, outputs)) is not None:
            self._losses.append(losses)
        self._foretell(trainer, batch, batch_idx + 1)
        if self._is_due(batch_idx + 1):  # reading the loss waits for the accelerator
            last = f"loss {self._losses[-1].mean().item():.4f}" if self._losses else ""
            self._show(batch_idx + 1, f"{self._client}  {last}".strip())

    def _foretell(self, trainer: L.Trainer, batch: Any, done: int) -> None:
        """Say once, in the first minute, the remaining work of a run that takes longer than a minute."""
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        self._tokens.append(0 if ids is None else ids.numel())
        is_early = time.monotonic() - self._fit_started < FORETOLD_AFTER
        # The first batch also loads and compiles.
        if self._foretold or is_early or self._rounds_after is None or len(self._tokens) < 2:
            return
        share = min(done / self._total, BEFORE_ITS_END)
        seconds = self._time_left.seconds(share, self._rounds_after, self._validations_left)
        self._foretold = seconds is not None
        if seconds is None or seconds <= MINUTE:
            return
        batches = round((self._rounds_after + 1) * self._total) - done
        tokens = round(sum(self._tokens) / len(self._tokens) * batches)
        said = [f"{batches:,} batches", *([f"about {tokens:,} tokens"] if tokens else []), self._left(share)]
        peak = hardware.peak_memory(trainer.lightning_module.device)
        kinds = dict.fromkeys(map(type, trainer.callbacks))  # type: ignore[attr-defined]
        if between := [kind.__name__ for kind in kinds if works_between_rounds(kind)]:
            said.append(f"not counted: {', '.join(between)}")
        memory = f"; {peak / 1e9:.1f} GB of memory at the peak so far" if peak else ""
        self._print_line(", ".join(said) + memory)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._records is not None and self._records.rounds_done == trainer.current_epoch:
            return  # ``max_time`` has cut the round
        losses = [each.reshape(-1) for each in self._losses]
        shown = {"loss": torch.cat(losses).mean().item()} if losses else {}
        metrics = trainer.progress_bar_metrics
        shown |= {name: float(value) for name, value in metrics.items() if name not in STEP_LOSSES}
        self._metrics.add(trainer.current_epoch + 1, shown)
        values = "  ".join(f"{name} {value:.4f}" for name, value in shown.items())
        seconds = time.monotonic() - self._started
        self._validations_left = _validations(trainer, trainer.current_epoch + 1)
        left = self._left(1.0) if self._rounds_after else ""
        took = f"{seconds:.1f} s{f', {left}' if left else ''}"
        ages = staleness_in_words(self._records.visit_records) if self._records is not None else ""
        self._print_line(f"{self._round_name(trainer)}: {values}{ages}  ({took})")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stop()

    on_test_end = on_predict_end = on_train_end

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "validate":
            self._begin("validate", sum(trainer.num_val_batches))
            return
        if _is_timed(trainer):
            self._time_left.validation_begins()
        if self._live is not None:
            self._live.update(self._task, completed=self._total, note="validation")

    def on_validation_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.state.fn == "validate":
            self._count("validate")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "validate":  # Lightning prints its table of results next
            self._stop()
        elif _is_timed(trainer):
            self._time_left.validation_ends()

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begin("test", sum(trainer.num_test_batches))

    def on_test_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._count("test")

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begin("predict", sum(trainer.num_predict_batches))

    def on_predict_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._count("predict")

    def _round_name(self, trainer: L.Trainer) -> str:
        unit = "epoch" if self._loop is None else "round"
        return f"{unit} {trainer.current_epoch + 1}/{trainer.max_epochs}"

    def _begin(self, name: str, total: float) -> None:
        """Begin a line for ``total`` batches; the first one starts the live display."""
        self._time_left.round_begins()
        self._started = self._shown = time.monotonic()
        self._done, self._total = 0, total
        if not self._enabled or not self.console.is_terminal:
            return
        if self._live is None:
            left, note = (TextColumn(f"{{task.fields[{name}]}}", markup=False) for name in ("left", "note"))
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                left,
                note,
            )
            self._live = Progress(*columns, console=self.console, transient=True)
            self._task = self._live.add_task(name, total=total, note="", left="")
            self._live.start()
        self._live.reset(self._task, description=name, total=total, note="", left=self._left(0.0))

    def _is_due(self, done: int) -> bool:
        """Return whether to update the live line."""
        # After the last batch in any case: the line must not end at 29/30.
        waited = done >= self._total or time.monotonic() - self._shown >= self.refresh_seconds
        return self._live is not None and waited

    def _show(self, done: int, note: str) -> None:
        assert self._live is not None
        self._shown = time.monotonic()
        left = self._left(min(done / self._total, BEFORE_ITS_END))
        self._live.update(self._task, completed=done, note=note, left=left)

    def _left(self, share: float) -> str:
        """Return the time left of the run, or of the pass over the data; empty where it is not known or over."""
        if self._rounds_after is None:
            return ""
        seconds = round(self._time_left.seconds(share, self._rounds_after, self._validations_left) or 0)
        known = self._time_left.is_whole(self._validations_left)
        return f"{in_largest_unit(seconds)} left{'' if known else ' and validation'}" if seconds else ""

    def _count(self, name: str) -> None:
        """Count a batch of validate, test or predict."""
        self._done += 1
        self._time_left.batch_ends()
        if self._is_due(self._done):
            self._show(self._done, "")
        elif self._live is None and self._done * 10 // self._total > (self._done - 1) * 10 // self._total:
            seconds = time.monotonic() - self._started
            self._print_line(f"{name}: {self._done}/{self._total} batches  ({seconds:.1f} s)")  # at most ten

    def _print_line(self, line: str) -> None:
        if self._enabled:
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _summarize(self, trainer: L.Trainer) -> None:
        """Print the metrics, the traffic or the devices' work, and the paths of the outputs."""
        unit = "epoch" if self._loop is None else "round"
        seconds = time.monotonic() - self._fit_started
        self.console.print(self._metrics.table(unit, seconds))
        log: VisitLog | None = find_callback(trainer, VisitLog)
        rows = [] if log is None else log.visit_rows()
        if rows and "device" in rows[0]:
            self.console.print(device_table(rows))
        elif rows:
            self._print_line(traffic(rows))
        for line in filter(None, (output_paths(trainer), report_command(trainer))):
            self._print_line(line)

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def _is_timed(trainer: L.Trainer) -> bool:
    """Tell whether a validation is timed apart from its round, since it is known which rounds have one."""
    return not trainer.sanity_checking and trainer.check_val_every_n_epoch is not None


def _validations(trainer: L.Trainer, rounds_done: int) -> int:
    """Return how many of the rounds behind ``rounds_done`` are validated; 0 where it is not known which."""
    every, last = trainer.check_val_every_n_epoch, trainer.max_epochs
    if every is None or last in (None, -1) or not trainer.enable_validation:
        return 0
    return last // every - rounds_done // every


def name_clients(names: Sequence[str], device: str) -> str:
    """Return the clients that are trained side by side in few words; ``device`` is the first one's, empty for none.

    Examples:
        >>> name_clients(["c001"], "phone"), name_clients(["c001", "c002"], ""), name_clients(["c001"] * 8, "phone")
        ('client c001 on phone', 'clients c001, c002', 'clients c001, c001 and 6 more')
    """
    shown = [quoted(name) for name in names[:2]]
    if len(names) == 1:
        return f"client {shown[0]}{f' on {device}' if device else ''}"
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return f"clients {', '.join(shown)}{more}"


def model_age(visits: Sequence[Visit], round_idx: int) -> str:
    """Return how many rounds old the model is that the first of some visits received; empty for the newest.

    Examples:
        >>> model_age([Visit("c001", 4, asked=3)], round_idx=5), model_age([Visit("c001", 4)], round_idx=5)
        (', model of 2 rounds ago', '')
    """
    age = round_idx - visits[0].asked_in(round_idx)
    return f", model of {count_noun(age, 'round')} ago" if age else ""


def staleness_in_words(rows: Sequence[Record]) -> str:
    """Return the staleness of a round's updates, behind two blanks; empty for a synchronous round or one without updates.

    Examples:
        >>> staleness_in_words([{"staleness": 0, "reason": ""}, {"staleness": 3, "reason": ""}])
        '  staleness 0 to 3'
        >>> staleness_in_words([{"staleness": 1, "reason": ""}]), staleness_in_words([{"reason": ""}])
        ('  staleness 1', '')
    """
    ages = [int(row["staleness"]) for row in rows if "staleness" in row and took_part(str(row["reason"]))]
    if not ages:
        return ""
    return f"  staleness {min(ages)}" + (f" to {max(ages)}" if max(ages) > min(ages) else "")
