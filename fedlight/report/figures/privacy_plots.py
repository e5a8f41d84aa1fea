"""Figures of privacy and utility as stages of a recipe: the trade-off, leakage over the rounds, and differences of methods.

Z. Zhang et al., "FewFedPIT: Towards Privacy-preserving and Few-shot Federated Instruction Tuning",
https://arxiv.org/abs/2403.06131, Figures 3 and 4(a); leakage over rounds also in FedDCA (Z. Wang et al.,
https://arxiv.org/abs/2409.20135), Figure 3. Each function reads runs' files, writes one SVG or PNG (by the ending of
``output``) and returns its path and the drawn numbers.
"""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from fedlight.evaluation.bootstrap import student_interval
from fedlight.report.figures.lines import Line, Values, draw_lines, draw_scatter, name_beside
from fedlight.report.figures.plots import Estimate, draw_intervals
from fedlight.report.figures.privacy_table import GLOBAL, PRETRAINED, metric_of, read_attacks
from fedlight.report.figures.style import MOST_LINES, STYLE, looks, new_figure, save
from fedlight.report.parts import deviation, points_of
from fedlight.support.files import result_of

LESS, MORE = "(less is better)", "(more is better)"


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
        names: column -> name of its axis; the column's own name if not given.

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
    across, up = ((names or {}).get(column, column) for column in (x, y))
    figure = draw_scatter(table, f"{across}  {LESS}", f"{up}  {MORE}", paths)
    return {"file": save(figure, output), "table": table}


def leakage_over_rounds(
    runs: dict[str, str | list[str]], metric: str, output: str, target: str = GLOBAL, name: str | None = None
) -> dict[str, Any]:
    """Draw what an attack finds after each round, a line for each method; the level before training is dashed.

    Args:
        runs: method -> folder of its run, or one for each seed.
        metric: column of ``attacks/attacks.csv``.
        output: the figure.
        target: ``global``, or ``uploads`` for the mean over a round's uploads.
        name: name of the axis; the column's name if not given.

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
        # Before training all methods have the same model, which belongs to no line.
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
    values = [[run[number] for run in series] for number in rounds]
    return {"round": [*rounds], "mean": [*map(mean, values)], "std": [*map(deviation, values)]}


@matplotlib.rc_context(STYLE)
def draw_leakage(table: Mapping[str, Values], name: str, level: float | None = None) -> Figure:
    """Draw the ``table`` of `leakage_over_rounds`; bands are standard deviations over the seeds."""
    if not 1 <= len(table) <= MOST_LINES:
        raise ValueError(
            f"{len(table)} lines: between 1 and {MOST_LINES} can be told apart: draw several figures"
        )
    figure, axes = new_figure()
    lines, ends, styles = {}, [], looks({method: method for method in table})
    for method, values in table.items():
        x, middle, std = (np.array(values[column]) for column in ("round", "mean", "std"))
        lines[method] = Line(x, middle, middle - std, middle + std, np.ones(len(x)))
        ends.append((method, (x[-1], middle[-1]), styles[method]["color"]))
    draw_lines(axes, lines, styles)
    if level is not None:
        axes.axhline(level, color="0.45", linestyle="--", linewidth=1, zorder=1)
        ends.append((PRETRAINED, (max(line.x[-1] for line in lines.values()), level), "0.45"))
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("communication rounds")
    axes.set_ylabel(name)
    name_beside(axes, ends)
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
        pairs: name of a point -> a method, and the method that is subtracted, both of the same seed.
        output: the figure.
        column: column of the rows.
        name: name of the axis; the column's name if not given.

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
    rows, points = [], {}
    for pair, methods in pairs.items():
        if len(methods) != 2:
            raise ValueError(f"pairs: {pair} has {len(methods)} methods: give one and the one to subtract")
        for method in methods:
            for folder, known in zip(folders, values, strict=True):
                if method not in known:
                    raise ValueError(f"pairs: {pair}: {folder} has no {column!r} of {method!r}")
        gaps = [known[methods[0]] - known[methods[1]] for known in values]
        points[pair] = Estimate(mean(gaps), *student_interval(gaps))
        ends = points[pair][1:] if len(gaps) > 1 else (None, None)
        rows.append(
            {"pair": pair, "difference": mean(gaps), "low": ends[0], "high": ends[1], "seeds": len(gaps)}
        )
    figure = draw_intervals({"": points}, f"difference of {name or column}", at=0.0)
    return {"file": save(figure, output), "rows": rows}
