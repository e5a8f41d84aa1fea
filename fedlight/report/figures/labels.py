"""Names in a figure, placed so that they cover neither each other nor lines and points."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg

Point = tuple[float, float]
ANGLES = tuple(math.radians(degrees) for degrees in (0, 180, 90, 270, 35, 145, 215, 325, 60, 120, 240, 300))
DISTANCES = (8, 13, 19, 27, 37, 50, 66, 86, 110)  # points of 1/72 inch
LEADER_FROM = 11
PADDING = 5


def spread_out(heights: Sequence[float], gap: float) -> list[float]:
    """Move heights apart as little as possible, so that neighbours keep their order and are at least ``gap`` apart.

    Examples:
        >>> spread_out([0.0, 5.0, 5.0, 9.0], 2.0), spread_out([1.0, 0.0], 2.0)
        ([0.0, 4.0, 6.0, 9.0], [1.5, -0.5])
    """
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    blocks: list[list[float]] = []  # each the sum of what its first name wants, and how many names it has
    for position, index in enumerate(order):
        blocks.append([heights[index] - gap * position, 1.0])
        while len(blocks) > 1 and _start(blocks[-2]) > _start(blocks[-1]):
            wanted, number = blocks.pop()
            blocks[-1] = [blocks[-1][0] + wanted, blocks[-1][1] + number]
    starts = [_start(block) for block in blocks for _ in range(int(block[1]))]
    placed = {index: starts[position] + gap * position for position, index in enumerate(order)}
    return [placed[index] for index in range(len(heights))]


def _start(block: Sequence[float]) -> float:
    return block[0] / block[1]


def name_lines(axes: Axes, ends: Sequence[tuple[str, str, float]]) -> None:
    """Write names (``ends``: name, colour, last value) beside the lines' ends, without overlap, once limits are set."""
    renderer = _renderer(axes)
    height = axes.get_window_extent(renderer).height
    low, high = axes.get_ylim()
    gap = 1.35 * axes.figure.dpi * 9 / 72 / height * (high - low)
    for (name, color, value), at in zip(ends, spread_out([end[2] for end in ends], gap), strict=True):
        axes.annotate(
            name,
            (1, value),
            (1.03, at),
            xycoords=axes.get_yaxis_transform(),
            textcoords=axes.get_yaxis_transform(),
            va="center",
            fontsize=9,
            color="0.15",
            arrowprops={
                "arrowstyle": "-",
                "color": color,
                "linewidth": 1.4,
                "shrinkA": 1,
                "shrinkB": 0,
                "relpos": (0, 0.5),
            },
        )


def name_points(
    axes: Axes,
    points: Sequence[tuple[str, Point]],
    lines: Sequence[Sequence[Point]] = (),
    marker: float = 7.0,
) -> None:
    """Write each name near its point, where nothing is yet; a name far away gets a thin line to its point.

    Args:
        axes: after everything is drawn and its limits are set.
        points: name and place.
        lines: what else must not be covered, as corners.
        marker: size of the points, in points of 1/72 inch.
    """
    renderer = _renderer(axes)
    scale = axes.figure.dpi / 72
    inside = np.array([axes.get_window_extent(renderer).extents])
    taken = [_around(axes.transData.transform([xy for _, xy in points]), marker * scale)]
    for corners in lines:
        taken.append(_around(_along(axes.transData.transform(corners), 4 * scale), 2 * scale))
    style: Any = {"textcoords": "offset points", "fontsize": 9, "va": "center", "ha": "center"}
    for name, xy in points:
        trial = axes.annotate(name, xy, (0, 0), **style)
        size = np.array(trial.get_window_extent(renderer).size) / scale + np.array([PADDING, 0])
        trial.remove()
        at, boxes = _free_place(axes.transData.transform(xy), size, scale, np.concatenate(taken), inside)
        taken.append(boxes)
        line = {"arrowstyle": "-", "color": "0.6", "linewidth": 0.7, "shrinkA": 1, "shrinkB": 3}
        axes.annotate(name, xy, at, arrowprops=line if len(boxes) > 1 else None, **style)


def _free_place(
    place: np.ndarray, size: np.ndarray, scale: float, taken: np.ndarray, inside: np.ndarray
) -> tuple[Point, np.ndarray]:
    """Return the nearest place that covers nothing, else the one that covers least.

    Args:
        place: of the point, in pixels.
        size: of its name, in points of 1/72 inch.
        scale: pixels of a point.
        taken: boxes in pixels, as left, bottom, right and top, ``(boxes, 4)``.
        inside: the box of the axes.

    Returns:
        Where the middle of the name stands, as an offset in points; and the boxes of the name and of its line, if any.
    """
    best: tuple[float, Point, np.ndarray] | None = None
    for at in _offsets(size[0], size[1]):
        middle = place + np.array(at) * scale
        boxes = np.concatenate([middle - size * scale / 2, middle + size * scale / 2])[None]
        outside = float(np.prod(size * scale)) - _shared(boxes, inside)
        gap = np.maximum(np.abs(at) - size / 2, 0)
        if np.hypot(*gap) > LEADER_FROM:
            boxes = np.concatenate([boxes, _leader(place, middle, scale)])
        covered = _shared(boxes, taken) + outside
        if best is None or covered < best[0] - 1e-6:
            best = (covered, at, boxes)
        if covered < 1e-6:
            break
    assert best is not None
    return best[1], best[2]


def _leader(place: np.ndarray, middle: np.ndarray, scale: float) -> np.ndarray:
    """Return the boxes of the line from a point to its far name, without those close to the point."""
    steps = _along(np.array([place, middle]), 2 * scale)
    far = np.hypot(*(steps - place).T) > LEADER_FROM / 2 * scale
    return _around(steps[far], scale)


def _offsets(width: float, height: float) -> Iterator[Point]:
    """Yield places for the middle of a text, the nearest first; distances are to the edge of the text."""
    for distance in DISTANCES:
        for angle in ANGLES:
            x, y = math.cos(angle), math.sin(angle)
            yield x * (distance + width / 2), y * (distance + height / 2)


def _along(corners: np.ndarray, step: float) -> np.ndarray:
    """Return places along a line, ``(places, 2)``."""
    found = []
    for start, end in pairwise(corners):
        number = max(2, math.ceil(float(np.hypot(*(end - start))) / step))
        found.append(start + np.linspace(0, 1, number)[:, None] * (end - start))
    return np.concatenate(found)


def _around(places: np.ndarray, size: float) -> np.ndarray:
    """Return squares around places, ``(places, 2)`` -> ``(places, 4)``."""
    return np.concatenate([places - size / 2, places + size / 2], axis=1)


def _shared(ours: np.ndarray, others: np.ndarray) -> float:
    """Return the area that boxes share with other boxes, summed over all pairs.

    Examples:
        >>> _shared(np.array([[0, 0, 2, 2]]), np.array([[1, 1, 5, 5], [2, 0, 3, 3], [-1, 0, 1, 1]]))
        2.0
    """
    low = np.maximum(ours[:, None, :2], others[None, :, :2])
    high = np.minimum(ours[:, None, 2:], others[None, :, 2:])
    return float(np.prod(np.maximum(high - low, 0), axis=-1).sum())


def _renderer(axes: Axes) -> Any:
    """Lay the figure out, so that places are known, and return its renderer."""
    figure: Any = axes.figure
    canvas = FigureCanvasAgg(figure)
    figure.draw_without_rendering()
    return canvas.get_renderer()
