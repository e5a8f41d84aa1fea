"""Figures of privacy and utility as stages of a recipe: the trade-off, leakage over the rounds, and differences of methods.

Z. Zhang et al., "FewFedPIT: Towards Privacy-preserving and Few-shot Federated Instruction Tuning",
https://arxiv.org/abs/2403.06131, Figures 3 and 4(a); leakage over rounds also in FedDCA (Z. Wang et al.,
https://arxiv.org/abs/2409.20135), Figure 3. Each function reads runs' files, writes one SVG or PNG (by the ending of
``output``) and returns its path and what it shows.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedlight.evaluation.bootstrap import student_interval
from fedlight.report.attack_log import GLOBAL, metric_of, read_attacks
from fedlight.report.figures.labels import Point, name_lines, name_points
from fedlight.report.figures.privacy_table import PRETRAINED
from fedlight.report.figures.style import (
    COLORS,
    MOST_LINES,
    STYLE,
    Looks,
    add_legend,
    colors,
    new_figure,
    save,
)
from fedlight.report.tables import deviation, points_of
from fedlight.support.files import result_of

Values = Mapping[str, Sequence[float]]
DASHES: Any = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))


def trade_off(
    tables: str | list[str],
    x: str,
    output: str,
    y: str = "utility",
    paths: dict[str, dict[str, str]] | None = None,
    names: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Draw a point for each method, leakage against utility: better is further up and to the left.

    Args:
        tables: folders of stages that called `fedlight.report.figures.privacy_table.privacy_table`, one for each seed.
        x: column across: an attack's.
        output: the figure.
        y: column upwards.
        paths: name of a line -> name of each of its points, in order -> the point's method; such as FewFedPIT and its betas.
        names: column -> what the axis is called; the column's own name if not given.

    Returns:
        ``file``; ``table``: method -> ``x`` and ``y``, a value for each seed. Methods without one of both are not drawn.

    Raises:
        ValueError: a folder has no result, no row has these columns, or a method of a path is none of the table.
    """
    table = points_of(tables, x, y)
    for path, points in (paths or {}).items():
        if missing := [method for method in points.values() if method not in table]:
            raise ValueError(
                f"paths: {path} has {missing[0]!r}, which is no method with {x} and {y}; there are {', '.join(table)}"
            )
    called = names or {}
    figure = draw_trade_off(table, called.get(x, x), called.get(y, y), paths or {})
    return {"file": save(figure, output), "table": table}


@matplotlib.rc_context(STYLE)
def draw_trade_off(
    table: Mapping[str, Values],
    x: str,
    y: str,
    paths: Mapping[str, Mapping[str, str]] | None = None,
    styles: Looks | None = None,
) -> Figure:
    """Draw the ``table`` of `trade_off`; crosses are standard deviations over the seeds; ``styles`` has methods' colours."""
    paths, styles = paths or {}, styles or {}
    figure, axes = new_figure()
    middles = {method: (mean(values["x"]), mean(values["y"])) for method, values in table.items()}
    on_paths = {method: label for points in paths.values() for label, method in points.items()}
    shades = dict(zip(paths, colors(len(paths) + 1, "lines and the other methods")[1:], strict=True))
    own = {method: shades[path] for path, points in paths.items() for method in points.values()}
    lines = [[middles[method] for method in points.values()] for points in paths.values()]
    for path, corners in zip(paths, lines, strict=True):
        axes.plot(*zip(*corners, strict=True), color=shades[path], linewidth=1.8, zorder=2, label=path)
    for method, values in table.items():
        usual = styles[method]["color"] if method in styles else COLORS[0]
        color = own.get(method, "0.35" if method == PRETRAINED else usual)
        marker = "o" if method in on_paths else "D" if method == PRETRAINED else "s"
        lines += _draw_cross(axes, values, color, marker)
    axes.margins(0.12)
    axes.set_xlabel(f"{x}  (less is better)")
    axes.set_ylabel(f"{y}  (more is better)")
    if paths:
        add_legend(figure, axes.get_legend_handles_labels()[0])
    first_on_paths = sorted(middles, key=lambda method: method not in on_paths)  # they get the nearest places
    name_points(axes, [(on_paths.get(method, method), middles[method]) for method in first_on_paths], lines)
    return figure


def _draw_cross(axes: Axes, values: Values, color: str, marker: str) -> list[list[Point]]:
    """Draw a point with its deviations over the seeds, and return the ends of both bars."""
    (x, xerr), (y, yerr) = ((mean(values[side]), deviation(values[side])) for side in "xy")
    bars: Any = {"ecolor": "0.65", "elinewidth": 1}
    axes.errorbar(x, y, yerr, xerr, fmt=marker, color=color, markersize=6, zorder=3, **bars)
    return [[(x - xerr, y), (x + xerr, y)], [(x, y - yerr), (x, y + yerr)]]


def leakage_over_rounds(
    runs: dict[str, str | list[str]], metric: str, output: str, target: str = GLOBAL, name: str | None = None
) -> dict[str, Any]:
    """Draw what an attack finds after each round, a line for each method; the level before training is dashed.

    Args:
        runs: method -> folder of its run, or one for each seed.
        metric: column of ``attacks/attacks.csv``.
        output: the figure.
        target: ``global``, or ``uploads`` for the mean over a round's uploads.
        name: what the axis is called; the column's name if not given.

    Returns:
        ``file``; ``table``: method -> ``round``, ``mean`` and ``std`` (over the seeds), lists of equal length;
        ``pretrained``: the level before training, mean over all runs that were attacked then; None for none.

    Raises:
        ValueError: a run was not attacked, has no such metric, or the seeds of a method were attacked at other rounds.
    """
    table: dict[str, dict[str, list[float]]] = {}
    levels: list[float] = []
    for method, folders in runs.items():
        series = [
            metric_of(read_attacks(folder, target), metric, folder)
            for folder in ([folders] if isinstance(folders, str) else folders)
        ]
        levels += [values.pop(0) for values in series if 0 in values]
        table[method] = _over_seeds(method, series)
    level = mean(levels) if levels else None
    figure = draw_leakage(table, name or metric, level)
    return {"file": save(figure, output), "table": table, "pretrained": level}


def _over_seeds(method: str, series: Sequence[Mapping[int, float]]) -> dict[str, list[float]]:
    rounds = sorted(series[0])
    if not rounds or any(sorted(values) != rounds for values in series):
        raise ValueError(
            f"{method}: its runs were attacked after rounds {[sorted(values) for values in series]}: give runs that were "
            "attacked after the same ones, at least one"
        )
    values = [[own[number] for own in series] for number in rounds]
    return {
        "round": [*rounds],
        "mean": [mean(own) for own in values],
        "std": [deviation(own) for own in values],
    }


@matplotlib.rc_context(STYLE)
def draw_leakage(table: Mapping[str, Values], name: str, level: float | None = None) -> Figure:
    """Draw the ``table`` of `leakage_over_rounds`; bands are standard deviations over the seeds."""
    if not 1 <= len(table) <= MOST_LINES:
        raise ValueError(
            f"{len(table)} lines: between 1 and {MOST_LINES} can be told apart: draw several figures"
        )
    figure, axes = new_figure()
    ends = []
    for number, (method, values) in enumerate(table.items()):
        color, dashes = COLORS[number % len(COLORS)], DASHES[number // len(COLORS)]
        axes.plot(
            values["round"],
            values["mean"],
            linestyle=dashes,
            color=color,
            linewidth=1.8,
            marker="o",
            markersize=3,
        )
        low, high = (
            [middle + sign * spread for middle, spread in zip(values["mean"], values["std"], strict=True)]
            for sign in (-1, 1)
        )
        axes.fill_between(values["round"], low, high, color=color, alpha=0.13, linewidth=0)
        ends.append((method, color, values["mean"][-1]))
    if level is not None:
        axes.axhline(level, color="0.45", linestyle="--", linewidth=1, zorder=1)
        ends.append((PRETRAINED, "0.45", level))
    rounds = sorted({number for values in table.values() for number in values["round"]})
    width = max(rounds[-1] - rounds[0], 1)
    axes.set_xlim(rounds[-1] - 1.01 * width, rounds[-1] + 0.015 * width)
    axes.set_xticks(rounds[:: math.ceil(len(rounds) / 12)])
    axes.set_xlabel("communication rounds")
    axes.set_ylabel(name)
    name_lines(axes, ends)
    return figure


def differences(
    tables: str | list[str],
    pairs: dict[str, list[str]],
    output: str,
    column: str = "utility",
    name: str | None = None,
) -> dict[str, Any]:
    """Draw how much more a method has than another: the mean over seeds of paired differences, with its 95 % t interval.

    Args:
        tables: folders of stages whose result has ``rows`` with ``method``, one for each seed.
        pairs: what a point is called -> a method, and the method that is subtracted, both of the same seed.
        output: the figure.
        column: column of the rows.
        name: what the axis is called; the column's name if not given.

    Returns:
        ``file``; ``rows``: ``pair``, ``difference`` (the mean), ``low`` and ``high`` (None for one seed), ``seeds`` (their
        number).

    Raises:
        ValueError: a pair has not two methods, a folder has no result, or a table lacks a method or its column.
    """
    folders = [tables] if isinstance(tables, str) else tables
    values = [
        {
            row["method"]: row[column]
            for row in result_of(folder).get("rows", [])
            if row.get(column) is not None
        }
        for folder in folders
    ]
    rows = []
    for pair, methods in pairs.items():
        if len(methods) != 2:
            raise ValueError(f"pairs: {pair} has {len(methods)} methods: give one and the one to subtract")
        for method in methods:
            if lacking := [folder for folder, own in zip(folders, values, strict=True) if method not in own]:
                raise ValueError(f"pairs: {pair}: {lacking[0]} has no {column!r} of {method!r}")
        rows.append(
            {"pair": pair, **_mean_with_interval([own[methods[0]] - own[methods[1]] for own in values])}
        )
    return {"file": save(draw_differences(rows, name or column), output), "rows": rows}


def _mean_with_interval(values: Sequence[float]) -> dict[str, float | int | None]:
    """Return the mean and the ends of its 95 % interval by Student's t, None for a single value."""
    low, high = student_interval(values) if len(values) > 1 else (None, None)
    return {"difference": mean(values), "low": low, "high": high, "seeds": len(values)}


@matplotlib.rc_context(STYLE)
def draw_differences(rows: Sequence[Mapping[str, Any]], name: str) -> Figure:
    """Draw the ``rows`` of `differences`, the first on top, beside a line at 0."""
    figure, axes = new_figure()
    axes.axvline(0, color="0.45", linestyle="--", linewidth=1, zorder=1)
    for height, row in enumerate(rows):
        if row["low"] is not None:
            axes.plot([row["low"], row["high"]], [height, height], color="0.55", linewidth=2, zorder=2)
        axes.plot([row["difference"]], [height], marker="o", color=COLORS[0], linestyle="none", zorder=3)
    axes.set_yticks(range(len(rows)), [row["pair"] for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(f"difference of {name}")
    return figure
