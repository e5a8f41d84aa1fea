"""Sums of a run over its devices, from the rows of ``visits.csv``."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fedlight.devices.outcomes import took_part
from fedlight.support.words import three_digits


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
