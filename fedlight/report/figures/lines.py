"""Lines with a band over seeds, and points of methods by two measures.

Names of points are in a column beside the figure, where they cannot cover each other.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedlight.report.figures.privacy_table import PRETRAINED
from fedlight.report.figures.style import (
    COLORS,
    HALF_A_PAGE,
    MOST_LINES,
    STYLE,
    Looks,
    add_legend,
    colors,
    key,
    looks_of,
    new_chart,
    new_figure,
    new_grid,
)
from fedlight.report.parts import Chart, deviation

MOST_POINTS = 300
MOST_BANDS = 6


class Line(NamedTuple):
    """Line with its spread over seeds; arrays are ``(points,)``."""

    x: np.ndarray  # positions, ascending
    middle: np.ndarray
    low: np.ndarray  # lower end of the band
    high: np.ndarray  # upper end of the band
    seeds: np.ndarray  # how many runs each point sums up


def draw_lines(axes: Axes, lines: Mapping[str, Line], styles: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw each line with its band; a short line gets a dot at each point."""
    for name, line in lines.items():
        style = styles[name]
        if (line.high > line.low).any():
            axes.fill_between(line.x, line.low, line.high, color=style["color"], alpha=0.15, linewidth=0)
        marker = "o" if len(line.x) <= 12 else ""
        (drawn,) = axes.plot(
            line.x, line.middle, linewidth=1.8, marker=marker, markersize=3.5, label=name, **style
        )
        drawn.set_gid(f"series:{name}")  # the page's script finds the line by it


@matplotlib.rc_context(STYLE)
def line_chart(
    name: str,
    title: str,
    caption: str,
    lines: Mapping[str, Line],
    known: Looks,
    x: str,
    y: str = "",
    column: str = "round",
    label: str = "run",
    scale: float | None = None,
    lowest: float | None = None,
) -> Chart:
    """Return a chart of lines, at most `MOST_LINES` of them; its rows have all.

    To the caption, bands and omissions are added; ``column`` and ``label`` are the rows' columns of positions and names. The
    figure divides positions by ``scale``, without which they are whole numbers, and begins upwards at ``lowest``.
    """
    shown = dict(list(lines.items())[:MOST_LINES])
    figure, axes = new_chart()
    drawn = {each: thinned(line._replace(x=line.x / (scale or 1))) for each, line in shown.items()}
    draw_lines(axes, drawn, looks_of(shown, known))
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if lowest is not None:
        axes.set_ylim(bottom=lowest)
    axes.locator_params(axis="x", integer=scale is None)
    key(figure, axes)
    notes = [caption + bands(shown.values())]
    if len(shown) < len(lines):
        notes.append(f"{len(shown)} of {len(lines)} lines are drawn; the CSV has all.")
    if any(len(line.x) > MOST_POINTS for line in shown.values()):
        notes.append("Neighbouring points are averaged; the CSV has all.")
    return Chart(name, title, " ".join(notes).strip(), figure, rows_of(lines, column, label))


class Panel(NamedTuple):
    """Lines of one pair of axes among several."""

    lines: Mapping[str, Line]
    title: str = ""
    y: str = ""
    level: float | None = None  # where a dashed grey line is drawn


@matplotlib.rc_context(STYLE)
def draw_panels(panels: Sequence[Panel], known: Looks, across: int = 1, from_zero: bool = False) -> Figure:
    """Draw panels in a grid, at most `MOST_LINES` lines in each, without bands where these would hide each other.

    The first lines in the order of the ``known`` looks are drawn, and ``across`` panels stand beside each other.
    """
    names = {name for panel in panels for name in panel.lines}
    styles = looks_of([name for name in known if name in names][:MOST_LINES], known)
    across = min(across, len(panels))
    height = 0.6 + 1.75 * -(-len(panels) // across) + 0.16 * len(styles)
    figure, grid = new_grid(len(panels), across, (HALF_A_PAGE[0], height), sharex=True)
    for axes, panel in zip(grid, panels, strict=True):
        shown = {name: line for name, line in panel.lines.items() if name in styles}
        if len(styles) > MOST_BANDS:
            shown = {name: line._replace(low=line.middle, high=line.middle) for name, line in shown.items()}
        draw_lines(axes, shown, styles)
        if from_zero or not any(line.middle.any() for line in shown.values()):
            axes.set_ylim(bottom=0)
        if panel.level is not None:
            axes.axhline(panel.level, color="0.45", linestyle=(0, (4, 2)), linewidth=1, zorder=1)
        axes.set_title(panel.title, fontsize=9)
        axes.set_ylabel(panel.y, fontsize=9)
        axes.tick_params(labelsize=8, labelbottom=True)  # shared axes have numbers in the lowest row alone
        axes.grid(axis="y", color="0.85", linewidth=0.6)
    for axes in grid[-across:]:
        axes.set_xlabel("rounds that are done", fontsize=9)
    # The legend of one panel stands for all.
    key(figure, grid[max(range(len(panels)), key=lambda place: len(panels[place].lines))])
    return figure


def over_seeds(series: Sequence[Mapping[float, float]]) -> Line:
    """Return the mean of runs (position -> value) at each position of any run, with a band from the lowest to the highest.

    Examples:
        >>> line = over_seeds([{1: 0.0, 2: 1.0}, {1: 1.0}])
        >>> line.x.tolist(), line.middle.tolist(), line.low.tolist(), line.high.tolist(), line.seeds.tolist()
        ([1, 2], [0.5, 1.0], [0.0, 1.0], [1.0, 1.0], [2, 1])
    """
    # Each position is one of some run, so nanmean has something to average.
    x = np.array(sorted({position for run in series for position in run}))
    values = np.array([[run.get(position, np.nan) for position in x] for run in series], dtype=float)
    middle, low, high = (reduce(values, axis=0) for reduce in (np.nanmean, np.nanmin, np.nanmax))
    return Line(x, middle, low, high, (~np.isnan(values)).sum(axis=0))


def rows_of(lines: Mapping[str, Line], x: str = "round", label: str = "run") -> list[dict[str, Any]]:
    """Return a row for each point of each line, with its band and the number of seeds.

    Examples:
        >>> rows_of({"a": over_seeds([{1.0: 0.5}])})
        [{'run': 'a', 'round': 1.0, 'mean': 0.5, 'low': 0.5, 'high': 0.5, 'seeds': 1}]
    """
    return [
        {label: name, x: at, "mean": middle, "low": low, "high": high, "seeds": seeds}
        for name, line in lines.items()
        for at, middle, low, high, seeds in zip(*(column.tolist() for column in line), strict=True)
    ]


def bands(lines: Iterable[Line]) -> str:
    """Return a caption's sentence about bands; empty where no line has one.

    Examples:
        >>> bands([over_seeds([{1: 0.0}])]), bands([over_seeds([{1: 0.0}, {1: 1.0}])])
        ('', ' Bands: from the lowest to the highest seed.')
    """
    is_mean = any((line.seeds > 1).any() for line in lines)
    return " Bands: from the lowest to the highest seed." if is_mean else ""


def thinned(line: Line, most: int = MOST_POINTS) -> Line:
    """Average neighbouring points, so that at most ``most`` are left; a short line stays as it is.

    Examples:
        >>> thinned(Line(*np.array([[1.0, 2, 3, 4]] * 5)), most=2).x.tolist()
        [1.5, 3.5]
    """
    if len(line.x) <= most:
        return line
    return Line(*binned(np.stack(line), most))


def binned(values: np.ndarray, most: int) -> np.ndarray:
    """Average neighbours along the last axis, so that at most so many values are left.

    Examples:
        >>> values = np.array([[1.0, 3.0, 5.0, 7.0, 9.0]])
        >>> binned(values, most=3).tolist(), (binned(values, most=9) == values).all().item()
        ([[2.0, 6.0, 9.0]], True)
    """
    wide = -(-values.shape[-1] // most)  # rounded up
    starts = range(0, values.shape[-1], wide)
    return np.stack([values[..., start : start + wide].mean(axis=-1) for start in starts], axis=-1)


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
    """Draw a named point for each method, ``x`` and ``y`` by seed, with a cross of standard deviations over the seeds.

    ``paths`` are lines: name of a line -> name of each of its points, in order -> the point's method.
    """
    paths = paths or {}
    figure, axes = new_figure()
    middles = {method: (mean(values["x"]), mean(values["y"])) for method, values in table.items()}
    color_of = {method: look["color"] for method, look in (styles or {}).items()} | {PRETRAINED: "0.35"}
    names = {method: label for points in paths.values() for label, method in points.items()}
    # The first colour is left for methods that are on no line.
    shades = colors(len(paths) + 1, "lines and the other methods")[1:]
    for color, (path, points) in zip(shades, paths.items(), strict=True):
        corners = [middles[method] for method in points.values()]
        axes.plot(*zip(*corners, strict=True), color=color, linewidth=1.8, zorder=2, label=path)
        color_of |= dict.fromkeys(points.values(), color)
    for method, values in table.items():
        xerr, yerr = (deviation(values[side]) for side in "xy")
        marks: Any = {"fmt": "o", "color": color_of.get(method, COLORS[0]), "ecolor": "0.6", "markersize": 6}
        axes.errorbar(*middles[method], yerr, xerr, zorder=3, **marks)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if paths:
        add_legend(figure, axes.get_legend_handles_labels()[0])
    name_beside(axes, [(names.get(method, method), at, "0.75") for method, at in middles.items()])
    return figure


def name_beside(axes: Axes, points: Sequence[tuple[str, Point, str]]) -> None:
    """Write names (``points``: name, place, colour of the line between) to the right of the axes, in order of height."""
    by_height = sorted(points, key=lambda point: point[1][1])  # so fewer of the connecting lines cross
    for (name, at, color), height in zip(by_height, np.linspace(0, 1, len(points) + 2)[1:-1], strict=True):
        line = {"arrowstyle": "-", "color": color, "linewidth": 0.7, "shrinkB": 4, "relpos": (0, 0.5)}
        beside: Any = {"textcoords": "axes fraction", "va": "center", "fontsize": "small"}
        axes.annotate(name, at, (1.03, height), arrowprops=line, **beside)
