"""Accuracy against the simulated time of a run and against the megabytes that it sent, and at equal amounts of both."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from fedlight.devices.outcomes import took_part
from fedlight.report.figures.style import STYLE, add_legend, colors, new_panels, save
from fedlight.report.sections.curves import curves
from fedlight.report.visits import visits_of
from fedlight.runs.rows import read_rows
from fedlight.runs.run import read_recipe
from fedlight.support.words import time_unit

Curve = dict[str, list[float]]


def quality_under_budget(runs: dict[str, str], output: str, metric: str = "val/accuracy") -> dict[str, Any]:
    """Draw a metric of the rounds over simulated time and over the megabytes of all clients, down and up.

    Args:
        runs: label -> folder of a run with a fleet, a VisitLog and a CSVLogger called ``metrics``.
        output: the figure.
        metric: validated after each round, or a score of TaskScores after some.

    Returns:
        ``file``; ``table``: label -> ``seconds``, ``megabytes`` and ``metric``, an entry for each round; ``rows``: where
        each run ended, with the clients that took part and those that dropped out, by reason.

    Raises:
        ValueError: a file or a column is missing, or no round was validated.
    """
    table = {label: budget_curve(Path(folder), metric) for label, folder in runs.items()}
    rows = [
        {"method": label, metric.replace("/", " "): curve["metric"][-1], **_whole(Path(runs[label]))}
        for label, curve in table.items()
    ]
    return {"file": save(draw_quality(table, metric), output), "table": table, "rows": rows}


def quality_at_budget(runs: dict[str, str], metric: str) -> dict[str, Any]:
    """Return a metric of each run at equal simulated time and at equal megabytes of all clients, down and up.

    Args:
        runs: label -> folder of a run, as for `quality_under_budget`.
        metric: measured after rounds.

    Returns:
        ``seconds`` of the shortest run and the fewest ``megabytes`` that a run has sent; ``rows`` with ``method``,
        ``at_time``, ``at_half_time``, ``at_bytes``, ``at_half_bytes`` and ``at_end``, the metric when it was last measured
        by then (None: it was not yet), ``hours`` and ``megabytes`` of the whole run, and who took part, as of
        `quality_under_budget`.

    Raises:
        ValueError: a file or a column is missing, or no round was validated.
    """
    curves = {label: budget_curve(Path(folder), metric) for label, folder in runs.items()}
    spent = [_spent(Path(folder)) for folder in runs.values()]
    budgets = {name: min(float(each[name][-1]) for each in spent) for name in ("seconds", "megabytes")}
    rows = [
        {
            "method": label,
            **{
                f"at_{part}{place}": _value_by(curve, name, budgets[name] * share)
                for part, share in (("", 1), ("half_", 0.5))
                for place, name in (("time", "seconds"), ("bytes", "megabytes"))
            },
            "at_end": curve["metric"][-1],
            **_whole(Path(runs[label])),
        }
        for label, curve in curves.items()
    ]
    return {**budgets, "rows": rows}


def _value_by(curve: Curve, name: str, budget: float) -> float | None:
    """Return the metric when it was last measured within a budget of ``seconds`` or ``megabytes``."""
    within = [value for spent, value in zip(curve[name], curve["metric"], strict=True) if spent <= budget]
    return within[-1] if within else None


def budget_curve(folder: Path, metric: str) -> Curve:
    """Return simulated seconds, megabytes and the metric at the end of each validated round."""
    spent = _spent(folder)
    curve = curves(read_recipe(folder)).metrics.get(metric, {})
    # Later rounds have no visits to be paid for, and 0 is before training.
    rounds = [int(done) - 1 for done in sorted(curve) if 0 < done <= len(spent["seconds"])]
    if not rounds:
        raise ValueError(
            f"{folder}: no metrics/version_*/metrics.csv in it has {metric} of any round, and no tasks/epoch_*/scores.json: "
            "give the folder of a run with a CSVLogger called metrics that validates after its rounds "
            "(trainer.limit_val_batches above 0), or with TaskScores"
        )
    paid = {name: values[rounds].tolist() for name, values in spent.items()}
    return {**paid, "metric": [curve[idx + 1] for idx in rounds]}


def _spent(folder: Path) -> dict[str, np.ndarray]:
    """Return simulated seconds and megabytes until the end of each round, ``(rounds,)``."""
    file, columns = folder / "visits.csv", ("round", "bytes_down", "bytes_up", "round_end_seconds")
    if (visits := visits_of(read_rows(file, columns), read_recipe(folder).metrics())) is None:
        raise ValueError(f"{file}: no row has a round: give the folder of a federated run")
    sent = visits.per_round("bytes_down") + visits.per_round("bytes_up")
    return {"seconds": visits.round_ends(), "megabytes": np.cumsum(sent / 1e6)}


def _whole(folder: Path) -> dict[str, float]:
    """Return hours and megabytes of the whole run, the clients that took part, and those that did not, by reason."""
    spent = _spent(folder)
    rows = read_rows(folder / "visits.csv", ("round", "client", "reason"))
    # Several visits of a client in a round count once.
    reasons = {(row["round"], row["client"]): row["reason"] for row in rows}
    dropped = Counter(sorted(reason for reason in reasons.values() if not took_part(reason)))
    return {
        "hours": float(spent["seconds"][-1]) / 3600,
        "megabytes": float(spent["megabytes"][-1]),
        "took_part": float(len(reasons) - dropped.total()),
        **{reason: float(number) for reason, number in dropped.items()},
    }


@matplotlib.rc_context(STYLE)
def draw_quality(table: Mapping[str, Curve], metric: str) -> Figure:
    """Draw the ``table`` of `quality_under_budget`."""
    figure, (by_time, by_bytes) = new_panels(2)
    longest = max(curve["seconds"][-1] for curve in table.values())
    scale, unit = time_unit(longest)
    for color, (label, curve) in zip(colors(len(table), "runs"), table.items(), strict=True):
        style: Any = {"color": color, "marker": "o", "markersize": 3}
        by_time.plot([seconds / scale for seconds in curve["seconds"]], curve["metric"], label=label, **style)
        by_bytes.plot(curve["megabytes"], curve["metric"], **style)
    by_time.set_xlabel(f"simulated {unit}")
    by_bytes.set_xlabel("megabytes sent, down and up")
    by_time.set_ylabel(metric.replace("/", " "))
    add_legend(figure, by_time.get_legend_handles_labels()[0], columns=2)
    return figure
