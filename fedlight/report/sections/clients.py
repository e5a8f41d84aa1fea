"""Spread of results over the clients, at the end and over the rounds."""

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np

from fedlight.evaluation.by_client import worst_share_mean
from fedlight.report.figures.lines import MOST_POINTS
from fedlight.report.figures.plots import STAGES, WORST, accuracy, common_stages, draw_clients, final
from fedlight.report.figures.style import NARROW, STYLE, Looks, key, looks_of, method_looks, new_chart
from fedlight.report.parts import Chart, Part, Section, Table, short, slug, table_of
from fedlight.runs.rows import number
from fedlight.runs.run import Run

ON_ONE_CHART = 6
MOST_BANDS = 8
MOST_LOSSES = 2
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
MEASURES = {"accuracy": "accuracy", "loss": "loss of the visits"}


def section(runs: Sequence[Run]) -> Section | None:
    """Return clients sorted by accuracy for each method, and the spread over the rounds."""
    stages = common_stages(run.csv("clients.csv") for run in runs)
    known = method_looks(runs)
    last: dict[str, list[list[float]]] = {}
    for run in runs:
        if accuracies := final(run.csv("clients.csv"), stages):
            last.setdefault(run.method, []).append(sorted(accuracies))
    parts: list[Part] = []
    if last:
        table = {method: _summed_up(of_seeds) for method, of_seeds in last.items()}
        names = list(table)
        for begin in range(0, len(names), ON_ONE_CHART):
            some = {name: table[name] for name in names[begin : begin + ON_ONE_CHART]}
            parts.append(_sorted_chart(some, begin // ON_ONE_CHART, len(names) > ON_ONE_CHART, known))
        parts.append(_table(table))
    bands = spread_over_rounds(runs)
    colors = {run.label: known[run.method]["color"] for run in runs}
    if sum(measure == "loss" for _, measure in bands) > MOST_LOSSES:  # the curves show the means side by side
        bands = {name: values for name, values in bands.items() if name[1] != "loss"}
    drawn = list(bands.items())[:MOST_BANDS]
    parts += [_band_chart(*name, values, colors[name[0]]) for name, values in drawn]
    notes = []
    if len(bands) > MOST_BANDS:
        notes.append(f"{MOST_BANDS} of {len(bands)} runs' spreads over the rounds are drawn.")
    if stages != STAGES:
        notes.append("Final accuracies are those of validations, as not every run here was tested.")
    if not parts:
        return None
    return Section("clients", "Clients", "The mean hides whom a model serves badly.", parts, tuple(notes))


def _summed_up(of_seeds: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Average over seeds at each rank; ranks that not all seeds have are left out."""
    clients = min(map(len, of_seeds))  # a seed may have failed to test some
    by_rank = np.mean([accuracies[:clients] for accuracies in of_seeds], axis=0)
    return {
        "accuracy": by_rank.tolist(),
        "mean": float(np.mean([np.mean(accuracies) for accuracies in of_seeds])),
        "worst_tenth": float(np.mean([worst_share_mean(accuracies, WORST) for accuracies in of_seeds])),
        "spread": float(np.mean([np.std(accuracies) for accuracies in of_seeds])),
        "seeds": len(of_seeds),
    }


def _sorted_chart(table: dict[str, dict[str, Any]], place: int, several: bool, known: Looks) -> Chart:
    # Drawn twice, as matplotlib copies no figure.
    figure, narrow = (draw_clients(table, looks_of(table, known)) for _ in range(2))
    narrow.set_size_inches(NARROW)
    narrow.axes[0].set_xlabel("rank of the client")
    rows = [
        {"method": method, "rank": rank, "accuracy": value}
        for method, values in table.items()
        for rank, value in enumerate(values["accuracy"], start=1)
    ]
    title = "Accuracy of each client, worst served first" + (f" ({place + 1})" if several else "")
    caption = "A client's accuracy is that of its own selector where it has one."
    if any(values["seeds"] > 1 for values in table.values()):
        caption += " At each rank the mean over seeds."
    return Chart(f"clients_sorted_{place + 1}", title, caption, figure, rows, narrow)


def _table(table: dict[str, dict[str, Any]]) -> Table:
    lines = [
        {
            "method": method,
            "clients": str(len(values["accuracy"])),
            "mean": short(values["mean"]),
            "worst tenth": short(values["worst_tenth"]),
            "standard deviation": short(values["spread"]),
            "lowest": short(min(values["accuracy"])),
        }
        for method, values in table.items()
    ]
    return table_of("Accuracy over the clients", lines, "Means over seeds.", folded=len(lines) > 8)


def spread_over_rounds(runs: Sequence[Run]) -> dict[tuple[str, str], dict[str, np.ndarray]]:
    """Return (run, measure) -> quantiles by round of accuracies, else of visits' losses, for each method's first seed."""
    spreads: dict[tuple[str, str], dict[str, np.ndarray]] = {}
    methods: set[str] = set()
    for run in runs:
        if run.method in methods:
            continue
        rows = [(r.get("round"), accuracy(r)) for r in run.csv("clients.csv") if r.get("stage") == "val"]
        measure = "accuracy" if rows else "loss"
        rows = rows or [(r.get("round"), number(r.get("loss"))) for r in run.csv("visits.csv")]
        pairs = [
            (at, value) for text, value in rows if value is not None and (at := number(text)) is not None
        ]
        if len({at for at, _ in pairs}) > 1:
            methods.add(run.method)
            spreads[run.label, measure] = quantiles(np.array(pairs))
    return spreads


def quantiles(pairs: np.ndarray, most: int = MOST_POINTS) -> dict[str, np.ndarray]:
    """Return the spread of values by round, neighbouring rounds together where there are more than ``most``.

    Args:
        pairs: round, from 0, and value, ``(values, 2)``.
        most: points of the result.

    Returns:
        ``round``, counted from 1, ``q10`` to ``q90`` and ``worst``, the mean of the lowest tenth; ``(points,)`` each.

    Examples:
        >>> quantiles(np.array([[0, 0.0], [0, 1.0], [1, 0.5]]))["q50"].tolist()
        [0.5, 0.5]
    """
    pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
    rounds = np.unique(pairs[:, 0])
    groups = np.array_split(rounds, min(most, len(rounds)))
    begins = np.searchsorted(pairs[:, 0], [group[0] for group in groups])
    parts = np.split(pairs[:, 1], begins[1:])
    by_round = np.array([np.quantile(part, QUANTILES) for part in parts])
    named = {f"q{round(100 * q)}": by_round[:, place] for place, q in enumerate(QUANTILES)}
    worst = np.array([worst_share_mean(part.tolist(), WORST) for part in parts])
    return {"round": np.array([group.mean() + 1 for group in groups]), **named, "worst": worst}


@matplotlib.rc_context(STYLE)
def _band_chart(label: str, measure: str, values: dict[str, np.ndarray], color: str) -> Chart:
    figure, axes = new_chart()
    x = values["round"]
    for low, high, alpha, name in (("q10", "q90", 0.15, "middle 80 %"), ("q25", "q75", 0.3, "middle half")):
        axes.fill_between(x, values[low], values[high], color=color, alpha=alpha, linewidth=0, label=name)
    axes.plot(x, values["q50"], color=color, linewidth=1.8, label="median")
    if measure == "accuracy":
        axes.plot(x, values["worst"], "--", color=color, linewidth=1.5, label="mean of the worst tenth")
    axes.set_xlabel("rounds that are done")
    axes.locator_params(axis="x", integer=True)
    axes.set_ylabel(MEASURES[measure])
    key(figure, axes)
    title, caption = f"{label}: loss over visits", "Mean training loss of each visit, by round."
    if measure == "accuracy":
        title, caption = f"{label}: accuracy over clients", "Validation examples of each client, by round."
    names = [name for name in values if name != "worst" or measure == "accuracy"]
    columns = (values[name].tolist() for name in names)
    rows = [dict(zip(names, point, strict=True)) for point in zip(*columns, strict=True)]
    return Chart(f"spread_{measure}_{slug(label)}", title, caption, figure, rows)
