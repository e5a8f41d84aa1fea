"""Figures of devices: participation, memory, and costs of rounds."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from fedlight.report.figures.lines import Line, draw_lines
from fedlight.report.figures.style import COLORS, HALF_A_PAGE, STYLE, add_legend, key
from fedlight.report.visits import OUTCOMES, PARTS, Peak, binned

POINTS = 100
"""Most places along an axis of rounds; of more rounds, neighbours are averaged."""
SHADES = (COLORS[0], "0.75", COLORS[1], COLORS[4], COLORS[3], COLORS[5], COLORS[2], COLORS[6])
"""Of `OUTCOMES`."""
BAR = 0.26  # inches
Styles = Mapping[str, Mapping[str, Any]]


def outcome_in_words(outcome: str) -> str:
    """Return an outcome in words."""
    return outcome.replace("_", " ") or "took part"


@matplotlib.rc_context(STYLE)
def draw_participation_by_device(table: Mapping[str, tuple[list[str], np.ndarray]]) -> Figure:
    """Draw bars of clients and rounds by outcome for each device: run -> devices' names, counts ``(outcomes, devices)``."""
    figure, panels = _stacked([len(names) for names, _ in table.values()])
    for axes, (run, (names, counts)) in zip(panels, table.items(), strict=True):
        _bars(axes, [name.replace("_", " ") for name in names], counts, SHADES)
        _title(axes, run)
    panels[-1].set_xlabel("clients that were asked, all rounds together")
    _legend_of_outcomes(figure, sum(counts.sum(axis=1) for _, counts in table.values()))
    return figure


@matplotlib.rc_context(STYLE)
def draw_participation_by_round(table: Mapping[str, np.ndarray]) -> Figure:
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
        _title(axes, run)
    panels[-1].set_xlabel("communication round")
    _legend_of_outcomes(figure, sum(counts.sum(axis=1) for counts in table.values()))
    return figure


@matplotlib.rc_context(STYLE)
def draw_memory(table: Mapping[str, Sequence[Peak]]) -> Figure:
    """Draw the parts of each device's largest visit, and a mark at its memory budget."""
    scale, unit = size_unit(max(max(sum(peak.parts), peak.budget) for own in table.values() for peak in own))
    figure, panels = _stacked([len(own) for own in table.values()])
    for axes, (run, own) in zip(panels, table.items(), strict=True):
        names = [f"{peak.device.replace('_', ' ')}, {peak.weight_bits} bits" for peak in own]
        _bars(axes, names, np.array([peak.parts for peak in own]).T / scale, COLORS)
        for place, peak in enumerate(own):
            low, high = place - 0.44, place + 0.44
            axes.plot([peak.budget / scale] * 2, [low, high], color="0.15", linewidth=2.2)
        _title(axes, run)
    panels[-1].set_xlabel(f"{unit} at the peak; mark: the device's budget")
    add_legend(figure, [Patch(color=color, label=part) for color, part in zip(COLORS, PARTS, strict=False)])
    return figure


@matplotlib.rc_context(STYLE)
def draw_costs(rounds: Mapping[str, Line], totals: Mapping[str, Line], name: str, styles: Styles) -> Figure:
    """Draw each run's costs by round, and below them the totals until then; ``name`` labels the axes, with the unit."""
    figure = Figure(figsize=(HALF_A_PAGE[0], 4.6), layout="constrained")
    panels = [*figure.subplots(2, 1, sharex=True)]
    for axes, lines, which in zip(panels, (rounds, totals), ("in a round", "so far"), strict=True):
        draw_lines(axes, lines, styles)
        axes.set_ylabel(f"{name}\n{which}")
        axes.set_ylim(bottom=0)
        axes.tick_params(labelsize=9)
        axes.grid(axis="y", color="0.85", linewidth=0.6)
    panels[1].set_xlabel("rounds that are done")
    key(figure, panels[0])
    return figure


def size_unit(most: float) -> tuple[float, str]:
    """Return the largest unit, as bytes and name, of which a number of bytes has at least one.

    Examples:
        >>> size_unit(3 * 2**30), size_unit(5e6), size_unit(10)
        ((1073741824, 'GiB'), (1048576, 'MiB'), (1024, 'KiB'))
    """
    units = ((2**30, "GiB"), (2**20, "MiB"))
    return next((unit for unit in units if most >= unit[0]), (2**10, "KiB"))


def _stacked(lines: Sequence[int], share_x: bool = False) -> tuple[Figure, list[Axes]]:
    """Return a figure with panels below each other, each as high as its lines need."""
    heights = [0.35 + BAR * max(number, 3) for number in lines]
    figure = Figure(figsize=(HALF_A_PAGE[0], 0.9 + sum(heights)), layout="constrained")
    rows: Any = {"squeeze": False, "sharex": share_x, "height_ratios": heights}
    return figure, [*figure.subplots(len(lines), 1, **rows)[:, 0]]


def _bars(axes: Axes, names: Sequence[str], values: np.ndarray, shades: Sequence[str]) -> None:
    """Draw horizontal stacked bars of ``values``, ``(parts, bars)``."""
    left = np.zeros(len(names))
    for part, color in zip(values, shades, strict=False):
        axes.barh(range(len(names)), part, left=left, color=color, height=0.72)
        left = left + part
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0, labelsize=9)


def _title(axes: Axes, run: str) -> None:
    axes.set_title(run, fontsize="medium", loc="left")


def _legend_of_outcomes(figure: Figure, totals: np.ndarray) -> None:
    there = [index for index, total in enumerate(totals) if total]
    patches = [Patch(color=SHADES[index], label=outcome_in_words(OUTCOMES[index])) for index in there]
    add_legend(figure, patches, columns=math.ceil(len(patches) / math.ceil(len(patches) / 4)))
