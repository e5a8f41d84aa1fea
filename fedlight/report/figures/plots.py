"""Figures as stages of a recipe: over-optimized selectors, accuracy by client, groups of clients, methods with intervals.

Each function reads CSV files of a run, writes one SVG or PNG (by the ending of ``output``), returns its path and content.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path as Outline

from fedlight.evaluation.by_client import worst_share_mean
from fedlight.report.figures.style import (
    COLORS,
    STYLE,
    Looks,
    add_legend,
    colors,
    new_figure,
    new_panels,
    save,
)
from fedlight.runs.rows import Rows, read_rows
from fedlight.runs.run import read_recipe
from fedlight.support.files import result_of
from fedlight.support.words import number

INCHES_OF_A_ROW = 0.28
WORST = 0.1
STAGES = ("own", "test", "validate", "val")
COLUMNS = ("stage", "round", "accuracy", "own_accuracy", "client")
"""Of ``clients.csv``."""
JUDGES = ("oracle", "selector")
ENDS: dict[str, Callable[[Sequence[float]], float]] = {"best": max, "last": lambda values: values[-1]}
LINES: Any = ("-", "--")


def reward_hacking(runs: dict[str, str], output: str) -> dict[str, Any]:
    """Draw the win rate over the raw model during tuning, by the oracle and by the selector that gave the labels.

    Args:
        runs: label -> folder of a run with a CSVLogger and with the callback ``WinRate``, whose judges are called ``oracle``
            and ``selector``; a resumed run has several ``metrics/version_*`` in it.
        output: the figure.

    Returns:
        ``file``; ``table``: label -> ``step``, ``oracle``, ``selector``, lists of equal length; ``rows``: the best and the
        last of them for each label.

    Raises:
        ValueError: a folder has no such metrics.
    """
    table = {label: _win_rates(Path(folder)) for label, folder in runs.items()}
    rows = [
        {"method": label, **{f"{name}_{at}": pick(won[name]) for name in JUDGES for at, pick in ENDS.items()}}
        for label, won in table.items()
    ]
    return {"file": save(draw_reward_hacking(table), output), "table": table, "rows": rows}


@matplotlib.rc_context(STYLE)
def draw_reward_hacking(table: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """Draw the ``table`` of `reward_hacking`."""
    figure, axes = new_figure()
    for color, (label, values) in zip(colors(len(table), "runs"), table.items(), strict=True):
        for name, line in zip(JUDGES, LINES, strict=True):
            shown = label if name == "oracle" else None  # a run has one line in the legend
            axes.plot(values["step"], values[name], line, color=color, marker="o", markersize=4, label=shown)
    axes.axhline(0.5, color="0.6", linewidth=0.8, zorder=0)
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel("win rate over the raw model\n(share of prompts)")
    styles = [
        Line2D([], [], color="0.3", linestyle=style, label=f"judged by the {name}")
        for name, style in zip(JUDGES, LINES, strict=True)
    ]
    add_legend(figure, [*axes.get_legend_handles_labels()[0], *styles])
    return figure


def clients(files: dict[str, str], output: str) -> dict[str, Any]:
    """Draw the accuracy of each client, clients sorted by it, a line for each method; the worst tenth is shaded.

    A client is scored by its own selector where it has one, else by the vote.

    Args:
        files: method -> the ``clients.csv`` of ClientAccuracy. Of its stages one counts: ``own`` (each client's own model)
            if it is there, else ``test``, ``validate``, or the last round of ``val``.
        output: the figure.

    Returns:
        ``file``; ``table``: method -> ``accuracy`` of the clients, lowest first, ``mean`` and ``worst_tenth``.

    Raises:
        ValueError: a file or a column is missing.
    """
    table: dict[str, dict[str, Any]] = {}
    for label, file in files.items():
        accuracies = sorted(final(read_rows(Path(file), COLUMNS)).values())
        mean = math.fsum(accuracies) / len(accuracies)  # the same in every order of the clients
        worst = worst_share_mean(accuracies, WORST)
        table[label] = {"accuracy": accuracies, "mean": mean, "worst_tenth": worst}
    shades = colors(len(table), "methods")
    styles: Looks = {label: {"color": color} for label, color in zip(table, shades, strict=True)}
    return {"file": save(draw_clients(table, styles), output), "table": table}


@matplotlib.rc_context(STYLE)
def draw_clients(table: Mapping[str, Mapping[str, Any]], styles: Looks) -> Figure:
    """Draw the ``table`` of `clients` in the methods' colours and dashes."""
    figure, axes = new_figure()
    for label, values in table.items():
        ranks = range(1, len(values["accuracy"]) + 1)
        shown = f"{label}: mean {values['mean']:.3f}, worst tenth {values['worst_tenth']:.3f}"
        axes.plot(ranks, values["accuracy"], linewidth=2, label=shown, **styles[label])
    most = max(len(values["accuracy"]) for values in table.values())
    # Rounded first: 0.1 * 30 is a little above 3, and its ceiling would shade a fourth client.
    axes.axvspan(0.5, math.ceil(round(WORST * most, 9)) + 0.5, color="0.9", zorder=0)
    axes.set_xlim(0.5, most + 0.5)
    axes.set_xlabel("rank of the client, worst served first (shaded: the worst tenth)")
    axes.set_ylabel("accuracy on a client's votes\n(share of votes)")
    add_legend(figure, axes.get_legend_handles_labels()[0], columns=1)
    return figure


def groups(file: str, output: str) -> dict[str, Any]:
    """Draw which selector each client trains after each grouping: a row per client, a column per grouping.

    Args:
        file: the ``groups.csv`` of GroupLog. Where it has known groups, the clients are sorted by them.
        output: the figure.

    Returns:
        ``file``; ``table``: ``round``, ``client``, ``known_group`` (empty without) and ``selector``, for each client
        a list with an entry per round, None where it was not grouped.

    Raises:
        ValueError: the file or a column is missing.
    """
    table = groups_of(read_rows(Path(file), ("round", "client", "selector")))
    return {"file": save(draw_groups(table), output), "table": table}


def groups_of(rows: Sequence[Mapping[str, str]]) -> dict[str, list[Any]]:
    """Return the ``table`` of `groups` from the rows of ``groups.csv``.

    Examples:
        >>> groups_of([{"round": "3", "client": "a", "selector": "1"}, {"round": "6", "client": "b", "selector": "0"}])
        {'round': [3, 6], 'client': ['a', 'b'], 'known_group': ['', ''], 'selector': [[1, None], [None, 0]]}
    """
    rounds = sorted({int(row["round"]) for row in rows})
    known = {row["client"]: row.get("known_group") or "" for row in rows}
    members = sorted(known, key=lambda client: (known[client], client))
    selectors = {(row["client"], int(row["round"])): int(row["selector"]) for row in rows}
    return {
        "round": rounds,
        "client": members,
        "known_group": [known[client] for client in members],
        "selector": [[selectors.get((client, number)) for number in rounds] for client in members],
    }


@matplotlib.rc_context(STYLE)
def draw_groups(table: Mapping[str, Sequence[Any]]) -> Figure:
    """Draw the ``table`` of `groups` in areas, which a page can recolour as no image; blank for clients without a group."""
    figure, axes = new_figure()
    image = np.array(table["selector"], dtype=float)  # None becomes NaN
    number, rounds = int(np.nanmax(image)) + 1, table["round"]
    shades = colors(number, "selectors")
    for selector, color in enumerate(shades):
        area = _cells(image == selector)
        # Without antialiasing: else a thin line of paper would show between two cells of a colour.
        axes.add_patch(PathPatch(area, facecolor=color, linewidth=0, antialiased=False))
    axes.set_xlim(-0.5, len(rounds) - 0.5)
    axes.set_ylim(len(image) - 0.5, -0.5)  # the first client on top
    every = math.ceil(len(rounds) / 12)  # more numbers would touch each other
    axes.set_xticks(range(0, len(rounds), every), [str(number) for number in rounds[::every]])
    axes.set_xlabel("communication round, counted from 0")
    _mark_known_groups(axes, table["known_group"])
    patches = [Patch(color=color, label=f"selector {index}") for index, color in enumerate(shades)]
    add_legend(figure, patches, columns=min(number, 4))
    return figure


def _cells(where: np.ndarray) -> Outline:
    """Return the outline of the true cells of ``(rows, columns)``, with neighbours in a row joined."""
    corners: list[list[tuple[float, float]]] = []
    for row, cells in enumerate(where):
        # Where cells of the area begin, and where they end.
        edges = np.flatnonzero(np.diff(np.concatenate([[False], cells, [False]]).astype(int)))
        top, bottom = row - 0.5, row + 0.5
        for low, high in edges.reshape(-1, 2) - 0.5:
            corners.append([(low, top), (high, top), (high, bottom), (low, bottom)])
    return Outline.make_compound_path_from_polys(np.array(corners).reshape(-1, 4, 2))


def _mark_known_groups(axes: Axes, known: Sequence[str]) -> None:
    """Draw a white line between known groups and their names at the side; without any, the number of clients."""
    names = sorted(set(known))
    if names == [""]:
        axes.set_ylabel(f"{len(known)} clients")
        return
    borders = np.cumsum([0, *(known.count(name) for name in names)])
    for border in borders[1:-1]:
        axes.axhline(border - 0.5, color="white", linewidth=3)
    middles = [(low + high - 1) / 2 for low, high in pairwise(borders)]
    axes.set_yticks(middles, [name or "not known" for name in names], rotation=90, va="center")
    axes.tick_params(axis="y", length=0)
    axes.set_ylabel(f"{len(known)} clients, by their known group")


def _win_rates(folder: Path) -> dict[str, list[float]]:
    """Return steps and win rates of a run; where a resumed run repeats a step, its value counts."""
    columns = [f"win_rate/{name}" for name in JUDGES]
    rows = read_recipe(folder).metrics()
    measured = {int(row["step"]): row for row in rows if all(row.get(column) for column in columns)}
    if not measured:
        raise ValueError(
            f"{folder}: no metrics/version_*/metrics.csv in it has the columns {' and '.join(columns)}: give the folder of "
            "a run with a CSVLogger called metrics and the callback WinRate with these two judges"
        )
    steps = sorted(measured)
    rates = {name: [float(measured[step][f"win_rate/{name}"]) for step in steps] for name in JUDGES}
    return {"step": [*steps], **rates}


def common_stages(tables: Iterable[Rows]) -> tuple[str, ...]:
    """Return the stages whose accuracies several ``clients.csv`` can be compared by: tests where all have been tested.

    Examples:
        >>> common_stages([[{"stage": "test"}, {"stage": "val"}], [{"stage": "val"}]])
        ('own', 'validate', 'val')
    """
    taken = {_stage(rows, STAGES) for rows in tables if rows}
    return tuple(stage for stage in STAGES if stage != "test") if {"test"} < taken else STAGES


def final(rows: Rows, stages: Sequence[str] = STAGES) -> dict[tuple[str, str], float]:
    """Return the final accuracies in a ``clients.csv``: of own models, else of a test, else of the last validation.

    Of ``stages`` the first that there is counts. The keys are the client and its number of examples, as text.

    Examples:
        >>> rows = [{"stage": "val", "round": f"{n}", "client": "a", "examples": "4", "accuracy": f"{n}"} for n in (0, 1)]
        >>> final(rows)
        {('a', '4'): 1.0}
    """
    stage = _stage(rows, stages)
    by_round: dict[float, dict[tuple[str, str], float]] = {}
    for row in (row for row in rows if row.get("stage") == stage):
        of_round = by_round.setdefault(number(row.get("round")) or 0.0, {})
        for column in ("own_accuracy", "accuracy"):  # of the client's own selector where it has one
            if (value := number(row.get(column))) is not None:
                of_round[row.get("client", ""), row.get("examples", "")] = value
                break
    return by_round[max(by_round)] if by_round else {}


def _stage(rows: Rows, stages: Sequence[str]) -> str | None:
    return next((name for name in stages if any(row.get("stage") == name for row in rows)), None)


class Estimate(NamedTuple):
    """Value with the ends of its interval."""

    value: float
    low: float
    high: float


def method_intervals(tables: list[str], output: str) -> dict[str, Any]:
    """Draw the accuracy of clients' own models with its interval, mean over the seeds.

    Args:
        tables: folders of the stage that made the rows with ``own``, ``own_low`` and ``own_high``, one for each seed.
        output: the figure, SVG or PNG.

    Returns:
        ``file``, and ``table``: method -> value, low, high.
    """
    rows = [row for table in tables for row in result_of(Path(table))["rows"]]
    table = estimates(rows, "own")
    return {
        "file": save(draw_intervals({"": table}, "accuracy of a client's own model"), output),
        "table": table,
    }


def estimates(rows: Sequence[Mapping[str, Any]], column: str) -> dict[str, Estimate]:
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
        method: Estimate(*(sum(numbers) / len(numbers) for numbers in zip(*values, strict=True)))
        for method, values in by_method.items()
    }


@matplotlib.rc_context(STYLE)
def draw_intervals(panels: Mapping[str, Mapping[str, Estimate]], label: str, at: float = 0.5) -> Figure:
    """Draw the methods' estimates in a panel for each title, with a line at ``at``; all panels have the same methods."""
    figure, axes = new_panels(len(panels))
    methods: Sequence[str] = [*next(iter(panels.values()))]
    figure.set_size_inches(4.0 + 2.0 * len(panels), 1.2 + INCHES_OF_A_ROW * len(methods))
    for place, (panel, (title, by_method)) in enumerate(zip(axes, panels.items(), strict=True)):
        panel.axvline(at, color="0.6", linewidth=0.8, zorder=0)
        for row, method in enumerate(methods):
            value, low, high = by_method[method]
            # A round cap would make the interval look longer.
            panel.plot([low, high], [row, row], color=COLORS[0], linewidth=1.5, solid_capstyle="butt")
            panel.plot([value], [row], marker="o", markersize=5, color=COLORS[0])
        panel.set_title(title, fontsize=10)
        panel.tick_params(labelsize=9, left=place == 0)
        panel.grid(axis="y", color="0.92", linewidth=0.6)
        panel.set_axisbelow(True)
    axes[0].set_yticks(range(len(methods)), methods)
    axes[0].set_ylim(len(methods) - 0.5, -0.5)
    figure.supxlabel(label, fontsize=10)
    return figure
