"""Points of methods by two measures, with their names in a column beside the figure, where they cannot cover each other."""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedlight.report.figures.privacy_table import PRETRAINED
from fedlight.report.figures.style import COLORS, STYLE, Looks, add_legend, colors, new_figure
from fedlight.report.tables import deviation

Point = tuple[float, float]
Values = Mapping[str, Sequence[float]]


@matplotlib.rc_context(STYLE)
def draw_scatter(
    table: Mapping[str, Values],
    x: str,
    y: str,
    paths: Mapping[str, Mapping[str, str]] | None = None,
    styles: Looks | None = None,
) -> Figure:
    """Draw a named point for each method, with a cross of standard deviations over the seeds.

    Args:
        table: method -> ``x`` and ``y``, a value for each seed.
        x: name of the axis across.
        y: name of the axis upwards.
        paths: name of a line -> name of each of its points, in order -> the point's method.
        styles: method -> ``color``.
    """
    paths = paths or {}
    figure, axes = new_figure()
    middles = {method: (mean(values["x"]), mean(values["y"])) for method, values in table.items()}
    own = {method: look["color"] for method, look in (styles or {}).items()} | {PRETRAINED: "0.35"}
    names = {method: label for points in paths.values() for label, method in points.items()}
    shades = colors(len(paths) + 1, "lines and the other methods")[1:]
    for color, (path, points) in zip(shades, paths.items(), strict=True):
        corners = [middles[method] for method in points.values()]
        axes.plot(*zip(*corners, strict=True), color=color, linewidth=1.8, zorder=2, label=path)
        own |= dict.fromkeys(points.values(), color)
    for method, values in table.items():
        xerr, yerr = (deviation(values[side]) for side in "xy")
        marks: Any = {"fmt": "o", "color": own.get(method, COLORS[0]), "ecolor": "0.6", "markersize": 6}
        axes.errorbar(*middles[method], yerr, xerr, zorder=3, **marks)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if paths:
        add_legend(figure, axes.get_legend_handles_labels()[0])
    name_beside(axes, [(names.get(method, method), at, "0.75") for method, at in middles.items()])
    return figure


def name_beside(axes: Axes, points: Sequence[tuple[str, Point, str]]) -> None:
    """Write names (``points``: name, place, colour of the line between) to the right of the axes, in order of height."""
    by_height = sorted(points, key=lambda point: point[1][1])
    for (name, at, color), height in zip(by_height, np.linspace(0, 1, len(points) + 2)[1:-1], strict=True):
        line = {"arrowstyle": "-", "color": color, "linewidth": 0.7, "shrinkB": 4, "relpos": (0, 0.5)}
        beside: Any = {"textcoords": "axes fraction", "va": "center", "fontsize": "small"}
        axes.annotate(name, at, (1.03, height), arrowprops=line, **beside)
