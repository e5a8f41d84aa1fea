"""Summary at the end of a run: metrics, traffic or the devices' work by the rows of ``visits.csv``, paths of the outputs."""

import math
import os
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from fedlight.devices.outcomes import DIVERGED, NO_PART, took_part
from fedlight.support.console import rich_table
from fedlight.support.words import count_noun, in_largest_unit, three_digits

if TYPE_CHECKING:  # reports read the sums of devices, and need no Lightning
    import lightning as L

TEMPORARY = ("run.lock",)  # files in a run's folder that exist only during the run


class MetricEnds:
    """First, last, lowest and highest value of each metric in a fit, with the rounds of the latter two.

    Examples:
        >>> ends = MetricEnds()
        >>> for number, loss in enumerate((2.0, 0.5, 1.0), start=1):
        ...     ends.add(number, {"loss": loss})
        >>> table = ends.table("round", seconds=90.0)
        >>> table.title, [next(column.cells) for column in table.columns]
        ('3 rounds in 1.5 minutes', ['loss', '2.0000', '1.0000', '0.5000 (2)', '2.0000 (1)'])
    """

    def __init__(self) -> None:
        self._first_round = self._last_round = 0
        self._ends: dict[str, list[tuple[float, int]]] = {}

    def __bool__(self) -> bool:
        return self._last_round > 0

    def add(self, number: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a round, counted from 1; NaN is no value."""
        self._first_round, self._last_round = self._first_round or number, number
        for name, value in metrics.items():
            now = value, number
            first, _, low, high = self._ends.setdefault(name, []) or [now] * 4  # []: NaN so far
            if not math.isnan(value):
                lowest, highest = (now if value < low[0] else low), (now if value > high[0] else high)
                self._ends[name] = [first, now, lowest, highest]

    def table(self, unit: str, seconds: float) -> Table:
        """Return the table of all metrics of a fit; ``unit`` is ``round`` or ``epoch``."""
        first, last = self._first_round, self._last_round
        rounds = count_noun(last, unit)
        if first > 1:  # of a resumed run
            rounds = f"{unit} {last}" if first == last else f"{unit}s {first} to {last}"
        header = ("metric", "first", "last", f"lowest ({unit})", f"highest ({unit})")
        lines = [
            [name, *(f"{x:.4f}" for x, _ in ends[:2]), *(f"{x:.4f} ({number})" for x, number in ends[2:])]
            for name, ends in self._ends.items()
            if ends
        ]
        return rich_table(f"{rounds} in {in_largest_unit(seconds)}", header, lines, left=("metric",))


def traffic(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the bytes sent in a run as a sentence, from the rows of its ``visits.csv``.

    Examples:
        >>> row = {"client": "c0", "bytes_down": "1500000", "bytes_up": "500000"}
        >>> traffic([row, row, {**row, "client": "c1"}])
        '4.5 MB down and 1.5 MB up in 3 visits to 2 clients'
    """
    down, up = (sum(int(row[name]) for row in rows) / 1e6 for name in ("bytes_down", "bytes_up"))
    clients = count_noun(len({row["client"] for row in rows}), "client")
    diverged = sum(row.get("reason") == DIVERGED for row in rows)
    out = f", of which {count_noun(diverged, 'visit')} diverged" if diverged else ""
    sent = f"{three_digits(down)} MB down and {three_digits(up)} MB up"
    return f"{sent} in {count_noun(len(rows), 'visit')} to {clients}{out}"


@dataclass
class DeviceTotals:
    """Sums over the visits of one device type; a client selected in a round counts once, whatever its visits."""

    clients: set[str] = field(default_factory=set)  # ids of the clients with such a device
    asked: set[tuple[str, str]] = field(default_factory=set)  # pairs of round and client id
    # reason for dropping out -> number of clients and rounds
    dropped: Counter[str] = field(default_factory=Counter)
    # LoRA ranks of its clients, where these differ from the module's
    lora_ranks: set[int] = field(default_factory=set)
    bytes_down: int = 0
    bytes_up: int = 0
    seconds: float = 0.0
    joules: float = 0.0

    def add(self, row: Mapping[str, str]) -> None:
        """Add one row of ``visits.csv``."""
        self.clients.add(row["client"])
        is_new = (row["round"], row["client"]) not in self.asked
        self.asked.add((row["round"], row["client"]))  # once, whatever its visits
        if is_new and not took_part(row["reason"]):  # all visits of a client in a round have the same reason
            self.dropped[row["reason"]] += 1
        if rank := row.get("lora_rank"):
            self.lora_ranks.add(int(rank))
        self.bytes_down += int(row["bytes_down"])
        self.bytes_up += int(row["bytes_up"])
        self.seconds += sum(float(row[f"{phase}_seconds"]) for phase in ("download", "compute", "upload"))
        self.joules += float(row["joules"])

    @property
    def took_part(self) -> int:
        """Number of clients and rounds whose update the server used."""
        return len(self.asked) - self.dropped.total()

    def cells(self, name: str, reasons: Sequence[str], with_ranks: bool = False) -> list[str]:
        """Return a line of the table, with a column for each of the reasons for dropping out, and one for LoRA ranks."""
        return [
            name,
            *([", ".join(map(str, sorted(self.lora_ranks)))] if with_ranks else []),
            *(f"{count:,}" for count in (len(self.clients), len(self.asked), self.took_part)),
            *(f"{self.dropped[reason]:,}" for reason in reasons),
            *(three_digits(size / 1e6) for size in (self.bytes_down, self.bytes_up)),
            three_digits(self.seconds / 3600),
            three_digits(self.joules / 1000),
        ]


def device_totals(rows: Iterable[Mapping[str, str]]) -> dict[str, DeviceTotals]:
    """Return device name -> its sums over the rows of ``visits.csv``, by name."""
    totals: dict[str, DeviceTotals] = {}
    for row in rows:
        totals.setdefault(row["device"], DeviceTotals()).add(row)
    return dict(sorted(totals.items()))


def device_table(rows: list[dict[str, str]]) -> Table:
    """Return the table of a run's devices (participation, dropouts by reason, costs) from all rows of ``visits.csv``."""
    seconds = max(float(row["round_end_seconds"]) for row in rows)
    rounds = 1 + max(int(row["round"]) for row in rows)  # they count from 0
    everybody = DeviceTotals()
    for row in rows:
        everybody.add(row)
    reasons = [reason for reason in NO_PART if everybody.dropped[reason]]
    # A terminal is narrow: no column without a count, no lines between columns, one blank (the box's) between two.
    table = Table(
        title=f"{count_noun(rounds, 'round')} in {in_largest_unit(seconds)} of simulated time",
        box=SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
        show_edge=False,
    )
    table.add_column("device", no_wrap=True)
    has_ranks = bool(everybody.lora_ranks)
    if has_ranks:
        table.add_column("LoRA ranks", min_width=5)
    counts = ["clients", "asked", "took part", *(reason.replace("_", " ") for reason in reasons)]
    for name in (*counts, "MB down", "MB up", "device hours", "kJ"):
        table.add_column(name, justify="right", min_width=max(map(len, name.split())))
    for name, totals in device_totals(rows).items():
        table.add_row(*totals.cells(name, reasons, has_ranks))
    table.add_section()
    table.add_row(*everybody.cells("all", reasons, has_ranks))
    return table


def output_paths(trainer: "L.Trainer") -> str:
    """Return a run's folder with its entries, or single paths for a run without a folder."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    folder = _own_folder(trainer)
    if folder is not None:
        left = (path for path in folder.iterdir() if path.name not in TEMPORARY)
        entries = sorted(f"{path.name}{'/' if path.is_dir() else ''}" for path in left)
        return f"{_relative(folder)}: {', '.join(entries)}" if entries else ""
    paths = [logger.log_dir or logger.save_dir for logger in trainer.loggers]
    savers = trainer.checkpoint_callbacks
    paths += [saver.best_model_path for saver in savers if isinstance(saver, ModelCheckpoint)]
    return ", ".join(_relative(Path(path)) for path in paths if path)


def report_command(trainer: "L.Trainer") -> str:
    """Return the command that reports a run with its own folder, else ""."""
    folder = _own_folder(trainer)
    if folder is None or (folder / "settings.json").exists():  # a stage of a recipe
        return ""
    has_run = any((folder / name).exists() for name in ("run.json", "visits.csv", "metrics"))
    return f"as a page: fedlight report {shlex.quote(_relative(folder))} --open" if has_run else ""


def _own_folder(trainer: "L.Trainer") -> Path | None:
    folder = Path(trainer.default_root_dir)
    # A run without a folder writes into the current one, beside other files.
    return folder if folder.resolve() != Path.cwd() and folder.is_dir() else None


def _relative(path: Path) -> str:
    """Return a path relative to the working directory where it lies inside, else as it is."""
    inside = path.resolve().is_relative_to(Path.cwd())
    return os.path.relpath(path) if inside else str(path)
