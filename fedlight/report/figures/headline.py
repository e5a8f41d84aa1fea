"""Results of a recipe as one figure: a panel for each of its most telling metrics, a line for each method."""

import re
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedlight.report.figures.style import HALF_A_PAGE, STYLE, Looks
from fedlight.report.parts import Chart
from fedlight.report.tables import deviation, shortened
from fedlight.runs.rows import number

PANELS = 4
SAME_PICTURE = 0.95  # correlation, over so many rows at least:
FEWEST = 4
MOST_METHODS = 24
SCORE = re.compile(r"win_rate|(^|_)(score|wins?)(_|$)")
LONGEST = 20  # characters of a name in the narrow figure, half as many as in the wide one
NARROW = 4.3  # inches: as wide as a phone, where the texts keep their size

Rows = Sequence[Mapping[str, Any]]
Values = Mapping[str, Mapping[str, list[float]]]  # metric -> method -> a value for each seed


def headline(rows: Rows, metrics: Sequence[str], most: int = PANELS) -> list[str]:
    """Return at most so many of the metrics, in order: first and last, a score, then those that most methods have.

    Examples:
        >>> rows = [{"method": m, **dict.fromkeys("abc", m), "d": 1, "win_rate": 1, "z": 1} for m in range(2)]
        >>> headline([*rows, {"method": 2, "d": 1}], ["a", "b", "c", "d", "win_rate", "z"])
        ['a', 'd', 'win_rate', 'z']
    """
    able = telling(rows, metrics)
    if len(able) <= most:
        return able
    methods = {metric: {r["method"] for r in rows if number(r.get(metric)) is not None} for metric in able}
    scores = [metric for metric in able if SCORE.search(metric)]
    by_methods = sorted(able, key=lambda metric: -len(methods[metric]))
    chosen = list(dict.fromkeys([able[0], *scores[:1], able[-1], *by_methods]))[:most]
    return [metric for metric in able if metric in chosen]


def telling(rows: Rows, metrics: Sequence[str]) -> list[str]:
    """Return the metrics in order, without those that are all but proportional to an earlier one.

    Examples:
        >>> rows = [{"x": x, "twice_x": 2 * x, "y": x % 2} for x in range(4)]
        >>> telling(rows, ["x", "twice_x", "y"])
        ['x', 'y']
    """
    kept: list[str] = []
    for metric in metrics:
        if not any(_goes_with(rows, metric, other) for other in kept):
            kept.append(metric)
    return kept


def _goes_with(rows: Rows, metric: str, other: str) -> bool:
    """Tell whether another metric is known for every row with this one, and the two are all but proportional."""
    pairs = [(number(row.get(metric)), number(row.get(other))) for row in rows]
    own = [pair for pair in pairs if pair[0] is not None]
    both = np.array([pair for pair in own if pair[1] is not None], dtype=float)
    if len(both) < max(FEWEST, len(own)) or not both.std(axis=0).all():
        return False
    return bool(np.corrcoef(both.T)[0, 1] > SAME_PICTURE)


@matplotlib.rc_context(STYLE)
def draw_results(
    rows: Rows, methods: Sequence[str], metrics: Sequence[str], title: str, name: str, styles: Looks
) -> Chart:
    """Draw a panel for each metric: mean of each method, bar of one standard deviation, dot for each seed."""
    shown = methods[:MOST_METHODS]
    values: dict[str, dict[str, list[float]]] = {metric: {} for metric in metrics}
    for metric, of_metric in values.items():
        for row in rows:
            if row["method"] in shown and (value := number(row.get(metric))) is not None:
                of_metric.setdefault(row["method"], []).append(value)
    records = [
        {
            "method": method,
            "metric": metric,
            "mean": mean(own[method]),
            "sd": deviation(own[method]),
            "seeds": len(own[method]),
        }
        for metric, own in values.items()
        for method in shown
        if method in own
    ]
    in_words = "; ".join(f"{r['method']}, {r['metric']}: {r['mean']:.3g}" for r in records)
    caption = "Large: the mean over seeds, with one standard deviation; small and grey: each seed."
    if all(record["seeds"] == 1 for record in records):
        caption = ""
    if len(shown) < len(methods):
        caption += f" The first {len(shown)} of {len(methods)} methods."
    return Chart(
        f"results_{name}",
        f"{title} at a glance",
        caption.strip(),
        f"{title}. {in_words}",
        _panels(values, shown, 2 * HALF_A_PAGE[0], 0.32, len(metrics), styles),
        records,
        _panels(values, shown, NARROW, 0.26, min(2, len(metrics)), styles) if len(metrics) > 1 else None,
    )


def _panels(
    values: Values, methods: Sequence[str], wide: float, line: float, columns: int, styles: Looks
) -> Figure:
    """Draw the panels in a grid with so many columns."""
    deep = -(-len(values) // columns)
    figure = Figure(figsize=(wide, deep * (1.1 + line * len(methods))))
    figure.set_layout_engine("constrained", wspace=0.06, hspace=0.04)  # ticks of neighbours do not touch
    panels = figure.subplots(deep, columns, sharey=True, squeeze=False)
    for axes in panels.flat[len(values) :]:
        axes.remove()
    for axes, (metric, own) in zip(panels.flat, values.items(), strict=False):
        _panel(axes, metric, [(own.get(method, []), styles[method]["color"]) for method in methods])
    longest = 2 * LONGEST if wide > NARROW else LONGEST  # else names leave no room for the panels
    names = [shortened(name, longest) for name in methods]
    panels[0, 0].set_yticks(range(len(methods)), names)
    panels[0, 0].set_ylim(len(methods) - 0.5, -0.5)
    return figure


def _panel(axes: Axes, metric: str, of_methods: Sequence[tuple[Sequence[float], str]]) -> None:
    for place, (values, color) in enumerate(of_methods):
        if not values:
            continue
        if len(values) > 1:
            axes.plot(values, np.full(len(values), place), "o", color="0.6", markersize=3.5)
        spread = deviation(values) if len(values) > 1 else None
        axes.errorbar(mean(values), place, xerr=spread, fmt="o", color=color, markersize=6.5, capsize=0)
    axes.set_title(metric.replace("_", " "), fontsize=10)
    axes.grid(axis="both", color="0.85", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9, length=0)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.locator_params(axis="x", nbins=4)
