"""Visits of a run as columns: costs of rounds, participation, and memory by device.

Rows are those of ``visits.csv`` (`fedlight.callbacks.logs.visit_log`); a client with several in a round takes part once.
What groupings of clients send is no visit's, and is logged by round.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedlight.devices.outcomes import NO_PART, took_part
from fedlight.runs.rows import Rows
from fedlight.support.words import number

OUTCOMES = ("", *NO_PART, "dropped")
"""Why a client dropped out; the empty one took part, and the last is that of a deployment, which says more."""
PARTS = ("base", "adapter", "gradient", "moment", "activation")
"""Of a visit's memory, as columns ``*_bytes``."""
MOST_ROUNDS = 1_000_000
"""Columns by round are as long as the largest one: a damaged number must not fill the memory."""


@dataclass(frozen=True)
class Visits:
    """Columns of a run's visits, ``(visits,)`` each."""

    rows: Rows  # as they were read
    rounds: np.ndarray  # counted from 0
    clients: np.ndarray  # as positions in ``client_names``
    client_names: list[str]  # each once
    devices: np.ndarray  # as positions in ``device_names``
    device_names: list[str]  # each once; empty for a run without a fleet
    outcomes: np.ndarray  # as positions in `OUTCOMES`
    grouped: dict[str, np.ndarray]  # ``bytes_down`` and ``bytes_up`` of groupings, ``(rounds,)`` each
    _columns: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def num_rounds(self) -> int:
        """Number of rounds up to the last one with a visit."""
        return int(self.rounds.max()) + 1

    def column(self, name: str) -> np.ndarray:
        """Return a column of numbers; NaN where there is none."""
        if name not in self._columns:
            self._columns[name] = np.array([number(row.get(name)) for row in self.rows], dtype=float)
        return self._columns[name]

    def per_round(self, name: str) -> np.ndarray:
        """Return the sum of a column in each round, with what groupings send, ``(rounds,)``."""
        # A value that is not known adds nothing.
        of_visits = np.bincount(self.rounds, np.nan_to_num(self.column(name)), self.num_rounds)
        return of_visits + self.grouped.get(name, 0.0)

    def round_ends(self) -> np.ndarray:
        """Return simulated seconds from the start to the end of each round, ``(rounds,)``; visits alone take time."""
        ends = np.zeros(self.num_rounds)
        np.maximum.at(ends, self.rounds, np.nan_to_num(self.column("round_end_seconds")))
        return np.maximum.accumulate(ends)  # a round without visits ends with the one before

    def participation(self) -> np.ndarray:
        """Return clients by outcome of their first visit in each round, ``(outcomes, rounds)``."""
        first = np.unique(self.rounds * len(self.client_names) + self.clients, return_index=True)[1]
        # Each pair of outcome and round is one number, as bincount counts single ones.
        pairs = self.outcomes[first] * self.num_rounds + self.rounds[first]
        return np.bincount(pairs, minlength=len(OUTCOMES) * self.num_rounds).reshape(len(OUTCOMES), -1)


def visits_of(rows: Rows, metrics: Sequence[Mapping[str, str]] = ()) -> Visits | None:
    """Return the columns of ``visits.csv``, without rows that have no round; None where there is no visit.

    ``metrics`` are the rows of the run's logger, which has the bytes of groupings.

    Raises:
        ValueError: a round is beyond `MOST_ROUNDS`.
    """
    numbered = [(row, at) for row in rows if (at := number(row.get("round"))) is not None and at >= 0]
    if not numbered:
        return None
    whole, rounds = zip(*numbered, strict=True)
    if (last := max(rounds)) >= MOST_ROUNDS:
        raise ValueError(f"visits.csv names round {last:.0f}, and no run has that many: the file is damaged")
    client_names, clients = _codes([row.get("client", "") for row in whole])
    device_names, devices = _codes([row.get("device", "") for row in whole])
    place = {reason: index for index, reason in enumerate(OUTCOMES)}
    reasons = [row.get("reason") or "" for row in whole]
    # A client may have taken part although it was over a limit; every other reason that is not listed is a deployment's.
    outcomes = [place.get(reason, 0 if took_part(reason) else place["dropped"]) for reason in reasons]
    return Visits(
        [*whole],
        np.array(rounds, dtype=np.int64),
        clients,
        client_names,
        devices,
        [] if device_names == [""] else device_names,
        np.array(outcomes, dtype=np.int64),
        {
            f"bytes_{way}": _logged(metrics, f"fed/grouping_bytes_{way}", int(last) + 1)
            for way in ("down", "up")
        },
    )


def _logged(metrics: Sequence[Mapping[str, str]], name: str, rounds: int) -> np.ndarray:
    """Return a metric of each round, ``(rounds,)``; 0 where it was not logged."""
    values = np.zeros(rounds)
    for row in metrics:
        at, value = number(row.get("epoch")), number(row.get(name))
        if value is not None and at is not None and 0 <= at < rounds:
            values[int(at)] = value
    return values


def _codes(texts: Sequence[str]) -> tuple[list[str], np.ndarray]:
    # As objects: else each text takes the room of the longest.
    names, codes = np.unique(np.array(texts, dtype=object), return_inverse=True)
    return names.tolist(), codes


def peaks(visits: Visits) -> list[dict[str, Any]]:
    """Return the largest visit of each device, whether it fitted or not, by budget, then by name.

    Returns:
        For each ``device``, ``weight_bits`` of the base on it, bytes of each of `PARTS`, and ``budget_bytes`` for training.
    """
    size = np.nan_to_num(visits.column("peak_bytes"))  # argmax would take NaN for the largest
    columns = ("weight_bits", *(f"{part}_bytes" for part in PARTS), "budget_bytes")
    largest: list[dict[str, Any]] = []
    for index, name in enumerate(visits.device_names):
        places = np.flatnonzero(visits.devices == index)
        row = visits.rows[places[size[places].argmax()]]
        largest.append({"device": name, **{column: int(number(row.get(column)) or 0) for column in columns}})
    return sorted(largest, key=lambda peak: (peak["budget_bytes"], peak["device"]))
