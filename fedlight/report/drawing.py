"""What the charts of a report share: their size, which method has which look, lines with a band, short texts of numbers."""

import re
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedlight.report.figures.figures import COLORS, add_legend
from fedlight.report.tables import number

SIZE = (5.6, 3.5)  # inches; half of a wide screen, and still legible on a phone
DASHES: Any = ("-", "--", ":")
MOST_LINES = 6 * len(DASHES)
MOST_POINTS = 300


class Line(NamedTuple):
    """A line with its spread.

    Attributes:
        x: positions, ascending, ``(points,)``.
        middle: ``(points,)``.
        low: lower end of the band, ``(points,)``.
        high: upper end of the band, ``(points,)``.
        seeds: how many runs it sums up.
    """

    x: np.ndarray
    middle: np.ndarray
    low: np.ndarray
    high: np.ndarray
    seeds: int


def new_chart(height: float = SIZE[1]) -> tuple[Figure, Axes]:
    """A figure of half the page's width."""
    figure = Figure(figsize=(SIZE[0], height), layout="constrained")
    axes = figure.subplots()
    axes.tick_params(labelsize=9)
    axes.locator_params(
        axis="y", nbins=5
    )  # else there are other ticks, and no room for them, once a legend takes its room
    axes.grid(axis="y", color="0.85", linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def looks(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Colour and dashes of each name; the same names in the same order look the same on every chart.

    Example:
        >>> looks(["a", "b"])["b"]
        {'color': '#D55E00', 'linestyle': '-'}
    """
    return {
        name: {"color": COLORS[place % 6], "linestyle": DASHES[place // 6 % len(DASHES)]}
        for place, name in enumerate(dict.fromkeys(names))
    }


def draw_lines(axes: Axes, lines: Mapping[str, Line], styles: Mapping[str, Mapping[str, Any]]) -> None:
    """Draws each line with its band; a line of one point gets a dot."""
    for name, line in lines.items():
        style = styles[name]
        if line.seeds > 1:
            axes.fill_between(line.x, line.low, line.high, color=style["color"], alpha=0.15, linewidth=0)
        marker = "o" if len(line.x) <= 12 else ""
        (drawn,) = axes.plot(
            line.x, line.middle, linewidth=1.8, marker=marker, markersize=3.5, label=name, **style
        )
        drawn.set_gid(f"series:{name}")


def key(figure: Figure, axes: Axes) -> None:
    """A legend above the axes where there are several lines, as many columns as their names leave room for."""
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) < 2:
        return
    longest = max(map(len, labels))
    add_legend(figure, handles, columns=max(1, min(3, 66 // (longest + 9), len(labels))))
    for handle, text in zip(figure.legends[0].legend_handles, figure.legends[0].get_texts(), strict=True):
        if handle is not None:
            handle.set_gid(f"series:{text.get_text()}")
        text.set_fontsize(9)


def over_seeds(series: Sequence[Mapping[float, float]]) -> Line:
    """Mean over runs at each position that any of them has, and from their lowest to their highest.

    Args:
        series: of each run, position -> value.

    Example:
        >>> line = over_seeds([{1: 0.0, 2: 1.0}, {1: 1.0}])
        >>> line.x.tolist(), line.middle.tolist(), line.low.tolist(), line.high.tolist(), line.seeds
        ([1, 2], [0.5, 1.0], [0.0, 1.0], [1.0, 1.0], 2)
    """
    x = np.array(sorted({position for one in series for position in one}))
    values = np.array([[one.get(position, np.nan) for position in x] for one in series], dtype=float)
    return Line(
        x, np.nanmean(values, axis=0), np.nanmin(values, axis=0), np.nanmax(values, axis=0), len(series)
    )


def bands(lines: Iterable[Line]) -> str:
    """The sentence of a caption about bands; empty where no line has one.

    Example:
        >>> bands([over_seeds([{1: 0.0}])]), bands([over_seeds([{1: 0.0}, {1: 1.0}])])
        ('', ' Bands: from the lowest to the highest seed.')
    """
    return " Bands: from the lowest to the highest seed." if any(line.seeds > 1 for line in lines) else ""


def thinned(line: Line, most: int = MOST_POINTS) -> Line:
    """Means of neighbouring points, so that there are at most ``most``; a short line stays as it is.

    Example:
        >>> thinned(Line(*np.array([[1.0, 2, 3, 4]] * 4), 1), most=2).x.tolist()
        [1.5, 3.5]
    """
    if len(line.x) <= most:
        return line
    x, middle, low, high = (
        np.array([part.mean() for part in np.array_split(column, most)]) for column in line[:4]
    )
    return Line(x, middle, low, high, line.seeds)


def slug(text: str) -> str:
    """A text as part of a file's name.

    Example:
        >>> slug("FedBiscuit, U = 3")
        'fedbiscuit_u_3'
    """
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_") or "x"


def short(value: Any) -> str:
    """A number as a reader wants it; other values as text.

    Example:
        >>> short(0.123456), short(12), short(1234567.0), short(None), short("x"), short(1.5e-05)
        ('0.123', '12', '1,234,567', '-', 'x', '1.5e-05')
    """
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or (value.is_integer() and abs(value) >= 10):
        return f"{value:,.0f}"
    return f"{value:.3f}" if 0.001 <= abs(value) < 1000 or value == 0 else f"{value:.4g}"


def spread(values: Sequence[Any]) -> str:
    """Mean ± standard deviation of numbers; texts as they are.

    Example:
        >>> spread([0.5]), spread([1.0, 2.0]), spread(["x", "x"]), spread([])
        ('0.500', '1.500 ± 0.707', 'x', '-')
    """
    numbers = [
        found for value in values if not isinstance(value, bool) and (found := number(value)) is not None
    ]
    if len(numbers) < len(values) or not numbers:
        return ", ".join(dict.fromkeys(short(value) for value in values)) or "-"
    if len(numbers) == 1:
        return short(values[0])
    return f"{short(mean(numbers))} ± {short(stdev(numbers))}"


def duration(seconds: float) -> str:
    """A time in the two largest units.

    Example:
        >>> duration(3.21), duration(95), duration(7260)
        ('3.2 s', '1 min 35 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
