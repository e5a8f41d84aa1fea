"""Availability of a device: always, with a probability, or in the intervals of a trace.

A phone trains while it is idle, charges and is on Wi-Fi, mostly at night: Bonawitz et al., "Towards Federated Learning at
Scale: System Design", MLSys 2019, https://arxiv.org/abs/1902.01046. Everything is a function of the virtual time and of
(seed, round, client), so a resumed run meets the same devices.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any, Protocol

from fedlight.support.checks import Settings
from fedlight.support.seeding import derive_seed

HOUR = 3600.0
DAY = 24 * HOUR


class Availability(Protocol):
    """Times when a device can be asked, and until when it stays."""

    def available_until(self, now_seconds: float, seed: int, round_idx: int, client_id: str) -> float | None:
        """Return the virtual time when the device leaves, infinite if unknown; None if it is absent now.

        Args:
            now_seconds: virtual time in seconds since the run's start, at least 0.
            seed: the run's.
            round_idx: the round that sampled the client.
            client_id: the device's owner.
        """

    def visits_per_day(self, seconds: float) -> float:
        """Return the average number of visits of so many seconds that fit one after the other into a day."""


@dataclass(frozen=True)
class Always:
    """Available at any time."""

    def available_until(self, now_seconds: float, seed: int, round_idx: int, client_id: str) -> float | None:
        return inf

    def visits_per_day(self, seconds: float) -> float:
        return DAY / seconds


@dataclass(frozen=True)
class Chance:
    """Available with a probability in [0, 1], drawn for each round and client, and then for the whole round.

    Raises:
        ValueError: ``probability`` is out of its range.

    Examples:
        >>> rounds = [Chance(0.25).available_until(0.0, 0, r, "c1") for r in range(1000)]
        >>> 1000 - rounds.count(None)
        259
    """

    probability: float

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise ValueError(f"availability={self.probability} is a probability: give a number in [0, 1]")

    def available_until(self, now_seconds: float, seed: int, round_idx: int, client_id: str) -> float | None:
        drawn = derive_seed(seed, "available", round_idx, client_id) / 2**32  # in [0, 1)
        return inf if drawn < self.probability else None

    def visits_per_day(self, seconds: float) -> float:
        return self.probability * DAY / seconds


@dataclass(frozen=True)
class Trace(Settings):
    """Available in half-open intervals ``[start, end)``, in hours since the run's start, looked up by binary search.

    Args:
        intervals_hours: ``((start, end), ...)`` in order, without overlap. With a period, starts lie in [0, period), and the
            last interval may run into the next one: ``(22, 30)`` of 24 hours is from ten in the evening to six.
        period_hours: time after which the intervals repeat; None for a trace that ends.
        spread_hours: each client's intervals lie later by a time in [0, ``spread_hours``), drawn by seed and client,
            so that not all clients come and go at once.

    Raises:
        ValueError: a value is no number, or intervals are empty, out of order, overlap or lie outside of the period.

    Examples:
        >>> night = Trace(((22.0, 30.0),), period_hours=24.0)
        >>> night.available_until(23 * 3600.0, 0, 0, "c1") / 3600, night.available_until(5 * 3600.0, 0, 0, "c1") / 3600
        (30.0, 6.0)
        >>> night.available_until(6 * 3600.0, 0, 0, "c1") is None
        True
    """

    intervals_hours: tuple[tuple[float, float], ...]
    period_hours: float | None = None
    spread_hours: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.period_hours is not None and not 0 < self.period_hours < inf:
            raise ValueError(f"availability.period_hours={self.period_hours} must be above 0")
        if not 0 <= self.spread_hours < inf:
            raise ValueError(f"availability.spread_hours={self.spread_hours} must be at least 0")
        _check_intervals(self.intervals_hours, self.period_hours)

    def available_until(self, now_seconds: float, seed: int, round_idx: int, client_id: str) -> float | None:
        starts, ends = self._stretches
        moved = self.spread_hours * HOUR * derive_seed(seed, "spread", client_id) / 2**32
        if self.period_hours is None:
            time, period = now_seconds - moved, 0.0
        else:
            period = self.period_hours * HOUR
            # Intervals that lie later are met by an earlier time.
            time = (now_seconds + (period - moved % period)) % period
        before = bisect_right(starts, time) - 1
        if before >= 0 and time < ends[before]:
            return now_seconds + (ends[before] - time)
        if period and time + period < ends[-1]:  # in the rest of the last period's last interval
            return now_seconds + (ends[-1] - period - time)
        return None

    def visits_per_day(self, seconds: float) -> float:
        """See `Availability.visits_per_day`; a visit longer than an interval never ends in it."""
        starts, ends = self._stretches
        if ends[-1] == inf:
            return DAY / seconds
        visits = sum((end - start) // seconds for start, end in zip(starts, ends, strict=True))
        return visits * DAY / (self.period_hours * HOUR if self.period_hours else ends[-1])

    @cached_property
    def _stretches(self) -> tuple[list[float], list[float]]:
        """Starts and ends in seconds; intervals that touch are joined."""
        stretches: list[list[float]] = []
        for start, end in self.intervals_hours:
            if stretches and stretches[-1][1] == _seconds(start):  # no client leaves between them
                stretches[-1][1] = _seconds(end)
            else:
                stretches.append([_seconds(start), _seconds(end)])
        period = _seconds(self.period_hours) if self.period_hours else inf
        # The last one touches the first of the next period; a single one that does so never ends.
        if stretches[-1][1] == stretches[0][0] + period:
            first = stretches.pop(0) if len(stretches) > 1 else [0.0, inf]
            stretches[-1][1] = first[1] + period
        return [start for start, _ in stretches], [end for _, end in stretches]


def _seconds(hours: float) -> float:
    return round(hours * HOUR, 3)  # else 8.3 and 24 hours are not 32.3


def _check_intervals(intervals: Sequence[tuple[float, float]], period: float | None) -> None:
    if not intervals:
        raise ValueError("availability.intervals_hours is empty: give at least one [start, end]")
    last_end = 0.0
    for start, end in intervals:
        where = f"availability.intervals_hours: [{start:g}, {end:g}]"
        if not start < end < inf:
            raise ValueError(
                f"{where} must end after it starts; past midnight is [22, 30] with period_hours: 24"
            )
        if start < last_end:
            raise ValueError(f"{where} starts before {last_end:g}: give intervals in order, without overlap")
        if period is not None and start >= period:
            raise ValueError(f"{where} starts outside of period_hours={period:g}")
        last_end = end
    if period is not None and _seconds(last_end) > _seconds(intervals[0][0] + period):
        raise ValueError(
            f"availability.intervals_hours: the last ends at {last_end:g}, after the first starts again at "
            f"{intervals[0][0] + period:g} (period_hours={period:g})"
        )


def parse_availability(value: Any) -> Availability:
    """Return the availability of a device's YAML: ``"always"``, a probability, or a mapping with the fields of a Trace.

    Raises:
        ValueError: ``value`` is none of these, or out of range.
    """
    if value == "always":
        return Always()
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return Chance(float(value))
    try:
        if not isinstance(value, dict):
            raise TypeError("it is none of these")
        intervals = tuple(map(tuple, value.get("intervals_hours", ())))
        return Trace(**{**value, "intervals_hours": intervals})
    except TypeError as error:
        raise ValueError(
            f"availability={value!r} ({error}): give always, a probability, or intervals_hours: [[start, end], ...], "
            "period_hours and spread_hours in numbers"
        ) from None
