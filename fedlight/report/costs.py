"""What rounds took, as charts: bytes both ways, simulated time and energy, a line for each method."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fedlight.report.device_charts import POINTS, draw_costs
from fedlight.report.drawing import MOST_LINES, Line, bands, looks, over_seeds, thinned
from fedlight.report.parts import Chart
from fedlight.report.visits import Visits
from fedlight.support.words import time_unit

ByMethod = dict[str, list[Visits]]
"""Method -> the visits of each seed."""


def cost_charts(by_method: ByMethod, fleets: ByMethod) -> list[Chart]:
    """Bytes both ways, and of runs with a fleet simulated time and energy."""
    found = [
        _cost_chart(f"bytes_{way}", f"Sent {way}, all clients", by_method, _sent(way), 1e6, "megabytes")
        for way in ("down", "up")
    ]
    if fleets:
        longest = max(float(visits.round_ends()[-1]) for own in fleets.values() for visits in own)
        scale, unit = time_unit(longest)
        found.append(
            _cost_chart(
                "time",
                "Simulated time, from the start of a round to its end",
                fleets,
                _round_seconds,
                scale,
                unit,
            )
        )
        found.append(_cost_chart("energy", "Energy of all clients", fleets, _joules, 1000, "kilojoules"))
    return found


def alike(table: Mapping[str, Any]) -> dict[str, Any]:
    """Runs with equal values under one name.

    Example:
        >>> alike({"a": np.array([1]), "b": np.array([2]), "c": np.array([1])})
        {'a, c': array([1]), 'b': array([2])}
    """
    names: dict[str, list[str]] = {}
    for run, values in table.items():
        names.setdefault(_key(values), []).append(run)
    return {
        ", ".join(own) if len(own) < 4 else f"{own[0]} and {len(own) - 1} more": table[own[0]]
        for own in names.values()
    }


def _key(values: Any) -> str:
    if isinstance(values, np.ndarray):
        return f"{values.shape} {values.tobytes()!r}"
    if isinstance(values, Line):
        return " ".join(_key(column) for column in values[:4])
    return " ".join(map(_key, values)) if isinstance(values, list | tuple) else repr(values)


def _sent(way: str) -> Callable[[Visits], np.ndarray]:
    return lambda visits: visits.per_round(f"bytes_{way}")


def _round_seconds(visits: Visits) -> np.ndarray:
    return np.diff(visits.round_ends(), prepend=0.0)


def _joules(visits: Visits) -> np.ndarray:
    return visits.per_round("joules")


def _cost_chart(
    name: str, title: str, methods: ByMethod, cost: Callable[[Visits], np.ndarray], scale: float, unit: str
) -> Chart:
    costs = alike({method: [cost(visits) / scale for visits in own] for method, own in methods.items()})
    costs = dict(list(costs.items())[:MOST_LINES])
    rounds = {run: _line(own) for run, own in costs.items()}
    totals = {run: _line([np.cumsum(each) for each in own]) for run, own in costs.items()}
    return Chart(
        name,
        title,
        f"Above what a round takes, below all rounds until then, in {unit}.{bands(totals.values())}"
        + (
            " Neighbouring rounds are averaged."
            if any(len(own.x) > POINTS for own in totals.values())
            else ""
        ),
        "Lines over the rounds. "
        + " ".join(f"{run}: {own.middle[-1]:,.3g} {unit} in total." for run, own in totals.items()),
        draw_costs(
            {run: thinned(own, POINTS) for run, own in rounds.items()},
            {run: thinned(own, POINTS) for run, own in totals.items()},
            unit,
            looks(totals),
        ),
        [
            {"run": run, "rounds_done": int(place), "in_a_round": float(one), "so_far": float(total)}
            for run, own in totals.items()
            for place, one, total in zip(own.x, rounds[run].middle, own.middle, strict=True)
        ],
    )


def _line(series: Sequence[np.ndarray]) -> Line:
    return over_seeds([dict(enumerate(map(float, values), start=1)) for values in series])
