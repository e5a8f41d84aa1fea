"""What ends a run: its metrics from the first round to the last, what was sent, and where it all lies."""

import math
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from rich.table import Table

from fedlight.federation.state import DIVERGED
from fedlight.support.words import duration, short

PASSING = ("run.lock",)
"""What is in the folder of a run only while it goes on."""


def metric_table(history: Mapping[int, Mapping[str, float]], unit: str, seconds: float) -> Table:
    """A line for each metric: at first, in the end, at its lowest and at its highest, with the round of these.

    Which of the two is the best one, only the metric knows.

    Args:
        history: round, from 1 -> its metrics by name, at least one round; a metric may be missing from a round or NaN.
        unit: what is counted, ``"round"`` or ``"epoch"``.
        seconds: what they took.

    Example:
        >>> table = metric_table({1: {"loss": 2.0}, 2: {"loss": 0.5}, 3: {"loss": 1.0}}, "round", 90.0)
        >>> table.title, [next(column.cells) for column in table.columns]
        ('3 rounds in 1.5 minutes', ['loss', '2.0000', '1.0000', '0.5000 (2)', '2.0000 (1)'])
    """
    table = Table(title=f"{_which(sorted(history), unit)} in {duration(seconds)}")
    for name in ("metric", "first", "last", f"lowest ({unit})", f"highest ({unit})"):
        table.add_column(name, justify="left" if name == "metric" else "right")
    for name in dict.fromkeys(name for metrics in history.values() for name in metrics):
        values = {n: history[n][name] for n in sorted(history) if name in history[n]}
        if values := {n: value for n, value in values.items() if not math.isnan(value)}:
            first, *_, last = [*values.values(), *values.values()]
            ends = [min(values, key=values.__getitem__), max(values, key=values.__getitem__)]
            cells = [f"{first:.4f}", f"{last:.4f}", *(f"{values[n]:.4f} ({n})" for n in ends)]
            table.add_row(name, *cells)
    return table


def _which(rounds: Sequence[int], unit: str) -> str:
    """``10 rounds``, or ``rounds 6 to 10`` of a run that was resumed."""
    first, last = rounds[0], rounds[-1]
    if first > 1:
        return f"{unit} {last}" if first == last else f"{unit}s {first} to {last}"
    return f"{last:,} {unit}{'s' if last > 1 else ''}"


def traffic(rows: Sequence[Mapping[str, str]]) -> str:
    """What was sent in a run, of the rows of its ``visits.csv``.

    Example:
        >>> row = {"client": "c0", "bytes_down": "1500000", "bytes_up": "500000"}
        >>> traffic([row, row, {**row, "client": "c1"}])
        '4.5 MB down and 1.5 MB up in 3 visits to 2 clients'
    """
    down, up = (sum(int(row[name]) for row in rows) / 1e6 for name in ("bytes_down", "bytes_up"))
    clients = len({row["client"] for row in rows})
    visits = f"{len(rows):,} visit{'s' if len(rows) > 1 else ''}"
    diverged = sum(row.get("reason") == DIVERGED for row in rows)
    out = f", of which {diverged:,} visit{'s' if diverged > 1 else ''} diverged" if diverged else ""
    return f"{short(down)} MB down and {short(up)} MB up in {visits} to {clients:,} client{'s' if clients > 1 else ''}{out}"


def places(trainer: L.Trainer) -> str:
    """Where a run has written: its folder with what is in it, or single paths where it has no folder of its own."""
    folder = _own_folder(trainer)
    if folder is not None:
        left = (path for path in folder.iterdir() if path.name not in PASSING)
        entries = sorted(f"{path.name}{'/' if path.is_dir() else ''}" for path in left)
        return f"{_relative(folder)}: {', '.join(entries)}" if entries else ""
    paths = [logger.log_dir or logger.save_dir for logger in trainer.loggers]
    checkpoints: list[Checkpoint] = trainer.checkpoint_callbacks
    paths += [one.best_model_path for one in checkpoints if isinstance(one, ModelCheckpoint)]
    return ", ".join(_relative(Path(path)) for path in paths if path)


def as_page(trainer: L.Trainer) -> str:
    """How a run that has a folder of its own is made a page; empty without one.

    A stage of a recipe says nothing: the recipe itself does, in its end.
    """
    folder = _own_folder(trainer)
    if folder is None or (folder / "settings.json").exists():
        return ""
    has_run = any((folder / name).exists() for name in ("run.json", "visits.csv", "metrics"))
    return f"as a page: fedlight report {shlex.quote(_relative(folder))} --open" if has_run else ""


def _own_folder(trainer: L.Trainer) -> Path | None:
    folder = Path(trainer.default_root_dir)
    return folder if folder.resolve() != Path.cwd() and folder.is_dir() else None


def _relative(path: Path) -> str:
    """As one would type it from here."""
    inside = path.resolve().is_relative_to(Path.cwd())
    return os.path.relpath(path) if inside else str(path)
