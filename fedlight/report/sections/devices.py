"""Devices and the wire: participation, dropouts, memory, costs of rounds; without a fleet, the wire and participation."""

import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from fedlight.callbacks.progress.run_summary import device_totals
from fedlight.devices.outcomes import NO_PART
from fedlight.report.figures.lines import (
    MOST_BANDS,
    Line,
    Panel,
    bands,
    binned,
    draw_panels,
    over_seeds,
    thinned,
)
from fedlight.report.figures.style import (
    COLORS,
    HALF_A_PAGE,
    MOST_LINES,
    STYLE,
    Looks,
    add_legend,
    looks_of,
    method_looks,
    new_grid,
)
from fedlight.report.parts import Chart, Part, Section, Table, table_of
from fedlight.report.visits import OUTCOMES, PARTS, Visits, peaks, visits_of
from fedlight.runs.run import Run
from fedlight.support.words import in_largest_unit, three_digits, time_unit

ByMethod = dict[str, list[Visits]]
"""Method -> the visits of each seed."""
PANELS = 4
"""Runs that have a panel of their own."""
POINTS = 100
"""Most places along an axis of rounds; of more rounds, neighbours are averaged."""
SHADES = (COLORS[0], "0.75", *(COLORS[number] for number in (1, 4, 3, 5, 2, 6)), "0.5", COLORS[7])
"""Of `OUTCOMES`."""
BAR = 0.26  # inches
UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
"""Bytes of a unit, and its name."""
TITLE: Any = {"fontsize": "medium", "loc": "left"}


def section(runs: Sequence[Run]) -> Section | None:
    """Return charts of the visits of all runs; None where no run has any."""
    by_method: ByMethod = {}
    notes: list[str] = []
    for run in runs:
        try:
            if visits := visits_of(run.csv("visits.csv"), run.metrics()):
                by_method.setdefault(run.method, []).append(visits)
        except ValueError as error:  # a damaged file of one run; the others are shown
            notes.append(f"{run.label}: left out: {error}")
    if not by_method:
        return Section("devices", "Participation and the wire", "", [], tuple(notes)) if notes else None
    fleets = {method: seeds for method, seeds in by_method.items() if seeds[0].device_names}
    known = method_looks(runs)
    parts: list[Part] = []
    if fleets:
        parts += _fleet_charts({method: seeds[0] for method, seeds in fleets.items()})
    parts += [*cost_charts(by_method, fleets, known), _totals(by_method)]
    for method, seeds in _first(fleets).items():
        try:
            parts.append(_devices(method, seeds[0]))
        except (ValueError, KeyError) as error:  # a damaged row
            notes.append(f"{method}: no table of its devices: {type(error).__name__}: {error}")
    if len(fleets) > PANELS:
        notes.append(f"Tables of devices are those of {PANELS} of {len(fleets):,} methods.")
    title, intro = "Participation and the wire", "What went over the wire."
    if fleets:
        title = "Devices and the wire"
        intro = "Everything is counted, not timed: simulated devices, exact bytes."
    return Section("devices", title, intro, parts, tuple(notes))


def _fleet_charts(fleets: Mapping[str, Visits]) -> list[Chart]:
    """Return charts of participation and memory for one seed of the first methods, equal ones once."""
    by_round = alike({method: fleet.participation() for method, fleet in fleets.items()})
    memory = alike({method: peaks(fleet) for method, fleet in fleets.items()})
    words = [*map(outcome_in_words, OUTCOMES)]
    return [
        Chart(
            "participation_by_round",
            "Who took part, by round",
            f"Clients that were asked in each round, by what became of them. One seed of each run.{_more(by_round)}",
            draw_participation(_first(by_round)),
            [
                {"run": run, "round": number, **dict(zip(words, column.tolist(), strict=True))}
                for run, counts in by_round.items()
                for number, column in enumerate(counts.T)
            ],
        ),
        Chart(
            "memory",
            "Memory of devices",
            "The largest visit of each device, part by part, and the device's budget. One seed of each run."
            + _more(memory),
            draw_memory(_first(memory)),
            [{"run": run, **peak} for run, devices in memory.items() for peak in devices],
        ),
    ]


def _first(table: Mapping[str, Any]) -> dict[str, Any]:
    return dict(list(table.items())[:PANELS])


def _more(table: Mapping[str, Any]) -> str:
    left = len(table) - PANELS
    return f" {left:,} more are in the data alone." if left > 0 else ""


def _totals(by_method: ByMethod) -> Table:
    """Return a line of totals for each method: means over its seeds."""
    lines = []
    for method, seeds in by_method.items():
        counts = np.mean([each.participation().sum(axis=1) for each in seeds], axis=0)
        down, up, joules = (
            np.mean([each.per_round(name).sum() for each in seeds])
            for name in ("bytes_down", "bytes_up", "joules")
        )
        line = {
            "run": method,
            "rounds": f"{np.mean([each.num_rounds for each in seeds]):,.0f}",
            "clients": f"{np.mean([len(each.client_names) for each in seeds]):,.0f}",
            "took part": f"{counts[0]:,.0f}",
            "MB down": three_digits(down / 1e6),
            "MB up": three_digits(up / 1e6),
        }
        if seeds[0].device_names:
            seconds = float(np.mean([each.round_ends()[-1] for each in seeds]))
            line["simulated time"] = in_largest_unit(seconds)
            line["kJ"] = three_digits(joules / 1000)
            # No division by 0 without any client.
            line["dropped out"] = f"{counts[1:].sum() / max(counts.sum(), 1):.0%}"
        lines.append(line)
    groupings = " Bytes of groupings of clients are part of it." * _has_groupings(by_method)
    return table_of(
        "What runs took", lines, f"Sums over all rounds and clients; means over the seeds.{groupings}"
    )


def _has_groupings(by_method: ByMethod) -> bool:
    return any(sent.any() for seeds in by_method.values() for each in seeds for sent in each.grouped.values())


def _devices(method: str, visits: Visits) -> Table:
    """Return the table that `device_table` prints at the end of a run."""
    totals = device_totals(visits.rows)
    reasons = [reason for reason in NO_PART if any(total.dropped[reason] for total in totals.values())]
    words = map(outcome_in_words, reasons)
    header = ["device", "clients", "asked", "took part", *words, "MB down", "MB up", "device hours", "kJ"]
    lines = [total.cells(name.replace("_", " "), reasons) for name, total in totals.items()]
    without = "Of visits alone, without groupings of clients." * _has_groupings({method: [visits]})
    return Table(f"Devices of {method}", header, lines, without)


def cost_charts(by_method: ByMethod, fleets: ByMethod, known: Looks) -> list[Chart]:
    """Return charts of bytes both ways and, for runs with a fleet, of simulated time and energy."""

    def chart(name: str, title: str, unit: str, cost: Callable[[Visits], np.ndarray]) -> Chart:
        shown = by_method if name.startswith("bytes") else fleets
        return _cost_chart(name, title, unit, {m: [*map(cost, seeds)] for m, seeds in shown.items()}, known)

    charts = [
        chart("bytes_down", "Sent down, all clients", "megabytes", lambda v: v.per_round("bytes_down") / 1e6),
        chart("bytes_up", "Sent up, all clients", "megabytes", lambda v: v.per_round("bytes_up") / 1e6),
    ]
    if fleets:
        scale, unit = time_unit(max(float(v.round_ends()[-1]) for seeds in fleets.values() for v in seeds))
        title = "Simulated time, from the start of a round to its end"
        charts += [
            chart("time", title, unit, lambda v: np.diff(v.round_ends(), prepend=0.0) / scale),
            chart("energy", "Energy of all clients", "kilojoules", lambda v: v.per_round("joules") / 1000),
        ]
    return charts


def alike(table: Mapping[str, Any]) -> dict[str, Any]:
    """Join runs with equal values under one name.

    Examples:
        >>> alike({"a": np.array([1]), "b": np.array([2]), "c": np.array([1])})
        {'a, c': array([1]), 'b': array([2])}
    """
    names: dict[bytes, list[str]] = {}
    for run, values in table.items():
        names.setdefault(pickle.dumps(values), []).append(run)
    return {
        ", ".join(runs) if len(runs) < 4 else f"{runs[0]} and {len(runs) - 1} more": table[runs[0]]
        for runs in names.values()
    }


def _cost_chart(
    name: str, title: str, unit: str, of_methods: Mapping[str, list[np.ndarray]], known: Looks
) -> Chart:
    costs = alike(of_methods)
    left = len(costs) - MOST_LINES
    rounds = {run: _line(seeds) for run, seeds in costs.items()}
    totals = {run: _line([np.cumsum(each) for each in seeds]) for run, seeds in costs.items()}
    panels = [
        Panel({run: thinned(line, POINTS) for run, line in lines.items()}, y=f"{unit}\n{which}")
        for lines, which in ((rounds, "in a round"), (totals, "so far"))
    ]
    return Chart(
        name,
        title,
        f"Above what a round takes, below all rounds until then, in {unit}."
        + bands(totals.values()) * (len(totals) <= MOST_BANDS)
        + " Neighbouring rounds are averaged." * any(len(line.x) > POINTS for line in totals.values())
        + (f" {left:,} more runs are in the data alone." if left > 0 else ""),
        draw_panels(panels, looks_of(totals, known), from_zero=True),
        [
            {"run": run, "rounds_done": int(place), "in_a_round": float(cost), "so_far": float(total)}
            for run, line in totals.items()
            for place, cost, total in zip(line.x, rounds[run].middle, line.middle, strict=True)
        ],
    )


def _line(series: Sequence[np.ndarray]) -> Line:
    return over_seeds([dict(enumerate(map(float, values), start=1)) for values in series])


def outcome_in_words(outcome: str) -> str:
    """Return an outcome in words."""
    return outcome.replace("_", " ") or "took part"


@matplotlib.rc_context(STYLE)
def draw_participation(table: Mapping[str, np.ndarray]) -> Figure:
    """Draw the clients of each round by outcome as stacked areas: run -> counts ``(outcomes, rounds)``."""
    figure, panels = _stacked([5] * len(table), share_x=True)
    for axes, (run, counts) in zip(panels, table.items(), strict=True):
        shown = binned(counts, POINTS)
        edges = np.linspace(0, counts.shape[1], shown.shape[1] + 1)
        below = np.zeros(shown.shape[1])
        for line, color in zip(shown, SHADES, strict=True):
            if line.any():
                axes.stairs(below + line, edges, baseline=below, fill=True, color=color, linewidth=0)
            below = below + line
        axes.set_ylabel("clients")
        axes.set_xlim(0, counts.shape[1])
        axes.set_title(run, **TITLE)
    panels[-1].set_xlabel("communication round")
    totals = sum(counts.sum(axis=1) for counts in table.values())
    there = [index for index, total in enumerate(totals) if total]
    patches = [Patch(color=SHADES[index], label=outcome_in_words(OUTCOMES[index])) for index in there]
    # At most four in a row, and rows of like length.
    add_legend(figure, patches, columns=math.ceil(len(patches) / math.ceil(len(patches) / 4)))
    return figure


@matplotlib.rc_context(STYLE)
def draw_memory(table: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Draw the parts of each device's largest visit, see `peaks`, and a mark at its memory budget."""
    columns = [f"{part}_bytes" for part in PARTS]
    every = [peak for bars in table.values() for peak in bars]
    most = max(max(sum(peak[part] for part in columns), peak["budget_bytes"]) for peak in every)
    scale, unit = next((unit for unit in UNITS if most >= unit[0]), UNITS[-1])
    figure, panels = _stacked([len(bars) for bars in table.values()])
    for axes, (run, bars) in zip(panels, table.items(), strict=True):
        names = [f"{peak['device'].replace('_', ' ')}, {peak['weight_bits']} bits" for peak in bars]
        left = np.zeros(len(bars))
        for part, color in zip(columns, COLORS, strict=False):
            sizes = np.array([peak[part] for peak in bars]) / scale
            axes.barh(range(len(bars)), sizes, left=left, color=color, height=0.72)
            left = left + sizes
        for place, peak in enumerate(bars):
            low, high = place - 0.44, place + 0.44  # a little taller than the bar
            axes.plot([peak["budget_bytes"] / scale] * 2, [low, high], color="0.15", linewidth=2.2)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0, labelsize=9)
        axes.set_title(run, **TITLE)
    panels[-1].set_xlabel(f"{unit} at the peak; mark: the device's budget")
    add_legend(figure, [Patch(color=color, label=part) for color, part in zip(COLORS, PARTS, strict=False)])
    return figure


def _stacked(lines: Sequence[int], share_x: bool = False) -> tuple[Figure, list[Axes]]:
    """Return a figure with panels below each other, each as high as its lines need."""
    heights = [0.35 + BAR * max(number, 3) for number in lines]
    inches = HALF_A_PAGE[0], 0.9 + sum(heights)
    return new_grid(len(lines), 1, inches, sharex=share_x, height_ratios=heights)
