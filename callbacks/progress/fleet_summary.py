"""The table of a run with devices, printed at its end: who took part, why others did not, what all of it took."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.box import SIMPLE_HEAD
from rich.table import Table

from fedlight.devices.clock import NO_PART
from fedlight.support.words import duration, short


@dataclass
class DeviceTotals:
    """Sums over the visits of one kind of device; a client that is asked in a round counts once, whatever its visits."""

    clients: set[str] = field(default_factory=set)
    asked: set[tuple[str, str]] = field(default_factory=set)
    dropped: Counter[str] = field(default_factory=Counter)
    bytes_down: int = 0
    bytes_up: int = 0
    seconds: float = 0.0
    joules: float = 0.0

    def add(self, row: Mapping[str, str]) -> None:
        """Counts one row of ``visits.csv``."""
        self.clients.add(row["client"])
        is_new = (row["round"], row["client"]) not in self.asked
        self.asked.add((row["round"], row["client"]))
        if row["reason"] and is_new:  # all visits of a client in a round have the same reason
            self.dropped[row["reason"]] += 1
        self.bytes_down += int(row["bytes_down"])
        self.bytes_up += int(row["bytes_up"])
        self.seconds += sum(float(row[f"{phase}_seconds"]) for phase in ("download", "compute", "upload"))
        self.joules += float(row["joules"])

    @property
    def took_part(self) -> int:
        """Clients and rounds in which the server used what they sent."""
        return len(self.asked) - self.dropped.total()

    def cells(self, name: str, reasons: Sequence[str]) -> list[str]:
        """A line of the table, with a column for each of these reasons to drop out."""
        return [
            name,
            *(f"{count:,}" for count in (len(self.clients), len(self.asked), self.took_part)),
            *(f"{self.dropped[reason]:,}" for reason in reasons),
            *(short(size / 1e6) for size in (self.bytes_down, self.bytes_up)),
            short(self.seconds / 3600),
            short(self.joules / 1000),
        ]


def device_totals(rows: Iterable[Mapping[str, str]]) -> dict[str, DeviceTotals]:
    """The sums of each device, by name.

    Args:
        rows: of ``visits.csv``.
    """
    found: dict[str, DeviceTotals] = {}
    for row in rows:
        found.setdefault(row["device"], DeviceTotals()).add(row)
    return dict(sorted(found.items()))


def fleet_summary(rows: list[dict[str, str]]) -> Table:
    """The table over all rows of ``visits.csv``, at least one, all of a run with devices.

    Reasons for which nobody dropped out have no column, and there are no lines between columns: a terminal is narrow.
    """
    seconds = max(float(row["round_end_seconds"]) for row in rows)
    rounds = 1 + max(int(row["round"]) for row in rows)
    everybody = DeviceTotals()
    for row in rows:
        everybody.add(row)
    reasons = [reason for reason in NO_PART if everybody.dropped[reason]]
    table = Table(
        title=f"{rounds:,} round{'s' if rounds > 1 else ''} in {duration(seconds)} of simulated time",
        box=SIMPLE_HEAD,
        padding=0,  # a blank between columns is the box's
        pad_edge=False,
        show_edge=False,
    )
    table.add_column("device", no_wrap=True)
    counts = ["clients", "asked", "took part", *(reason.replace("_", " ") for reason in reasons)]
    for name in (*counts, "MB down", "MB up", "device hours", "kJ"):
        table.add_column(name, justify="right", min_width=max(map(len, name.split())))
    for name, totals in device_totals(rows).items():
        table.add_row(*totals.cells(name, reasons))
    table.add_section()
    table.add_row(*everybody.cells("all", reasons))
    return table
