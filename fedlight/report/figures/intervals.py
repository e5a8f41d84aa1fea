"""Figure of methods' values with their intervals: a dot and a line for each method, a panel for each set of data."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure

from fedlight.report.figures.style import COLORS, STYLE, new_panels, save
from fedlight.support.files import result_of
from fedlight.support.types import Rows

INCHES_OF_A_ROW = 0.28


class Estimate(NamedTuple):
    """Value with the ends of its interval."""

    value: float
    low: float
    high: float


def method_intervals(
    tables: list[str], output: str, column: str = "own", label: str = "accuracy of a client's own model"
) -> dict[str, Any]:
    """Draw a column of a recipe's tables with its interval, mean over the seeds.

    Args:
        tables: folders of the stage that made the table, one for each seed.
        output: the figure, SVG or PNG.
        column: column of the rows, with its ends in ``COLUMN_low`` and ``COLUMN_high``.
        label: name of the axis.

    Returns:
        ``file``, and ``table``: method -> value, low, high.
    """
    rows = [row for table in tables for row in result_of(Path(table))["rows"]]
    found = estimates(rows, column)
    return {"file": save(draw_intervals({"": found}, label), output), "table": found}


def estimates(rows: Rows, column: str) -> dict[str, Estimate]:
    """Return method -> mean over its rows; methods without the column are left out.

    Examples:
        >>> rows = [{"method": "m", "own": x, "own_low": x - 0.25, "own_high": x + 0.25} for x in (0.5, 1.0)]
        >>> estimates([*rows, {"method": "n"}], "own")
        {'m': Estimate(value=0.75, low=0.5, high=1.0)}
    """
    names = (column, f"{column}_low", f"{column}_high")
    by_method: dict[str, list[list[float]]] = {}
    for row in rows:
        if all(name in row for name in names):
            by_method.setdefault(row["method"], []).append([row[name] for name in names])
    return {
        method: Estimate(*(sum(of) / len(of) for of in zip(*values, strict=True)))
        for method, values in by_method.items()
    }


@matplotlib.rc_context(STYLE)
def draw_intervals(panels: Mapping[str, Mapping[str, Estimate]], label: str, at: float = 0.5) -> Figure:
    """Draw the estimates of each panel, methods from top to bottom, with a line at the value ``at``.

    Args:
        panels: title -> method -> estimate; every panel has the methods of the first.
        label: name of the axes.
        at: value of the line, such as chance.
    """
    figure, axes = new_panels(len(panels))
    methods: Sequence[str] = [*next(iter(panels.values()))]
    figure.set_size_inches(4.0 + 2.0 * len(panels), 1.2 + INCHES_OF_A_ROW * len(methods))
    for place, (own, (title, found)) in enumerate(zip(axes, panels.items(), strict=True)):
        own.axvline(at, color="0.6", linewidth=0.8, zorder=0)
        for row, method in enumerate(methods):
            value, low, high = found[method]
            own.plot([low, high], [row, row], color=COLORS[0], linewidth=1.5, solid_capstyle="butt")
            own.plot([value], [row], marker="o", markersize=5, color=COLORS[0])
        own.set_title(title, fontsize=10)
        own.tick_params(labelsize=9, left=place == 0)
        own.grid(axis="y", color="0.92", linewidth=0.6)
        own.set_axisbelow(True)
    axes[0].set_yticks(range(len(methods)), methods)
    axes[0].set_ylim(len(methods) - 0.5, -0.5)
    figure.supxlabel(label, fontsize=10)
    return figure
