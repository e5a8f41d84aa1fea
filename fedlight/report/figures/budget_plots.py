"""Accuracy against the simulated time of a run and against the megabytes that it sent, and at equal amounts of both."""

import json
import math
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from fedlight.devices.outcomes import took_part
from fedlight.report.figures.style import STYLE, add_legend, colors, new_panels, save
from fedlight.runs.folders import versions
from fedlight.runs.rows import read_rows
from fedlight.support.files import read_text
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
        {
            "method": label,
            metric.replace("/", " "): table[label]["metric"][-1],
            "hours": table[label]["seconds"][-1] / 3600,
            "megabytes": table[label]["megabytes"][-1],
            **_participation(Path(folder)),
        }
        for label, folder in runs.items()
    ]
    return {"file": save(draw_quality(table, metric), output), "table": table, "rows": rows}


def quality_at_budget(
    runs: dict[str, str], metric: str, seconds: float | None = None, megabytes: float | None = None
) -> dict[str, Any]:
    """Return a metric of each run at equal simulated time and at equal megabytes of all clients, down and up.

    Args:
        runs: label -> folder of a run, as for `quality_under_budget`.
        metric: measured after rounds.
        seconds: simulated time that every run gets; None: the shortest of the runs.
        megabytes: what every run may send; None: the least that one of the runs has sent.

    Returns:
        ``seconds`` and ``megabytes``; ``rows`` with ``method``, ``at_time``, ``at_half_time``, ``at_bytes``,
        ``at_half_bytes`` and ``at_end``, the metric when it was last measured by then (None: it was not yet), ``hours`` and
        ``megabytes`` of the whole run, and who took part, as of `quality_under_budget`.

    Raises:
        ValueError: a file or a column is missing, or a run is shorter or sent less than it was to get.
    """
    curves = {label: budget_curve(Path(folder), metric) for label, folder in runs.items()}
    budgets = {
        name: min(curve[name][-1] for curve in curves.values()) if given is None else given  # 0 is given too
        for name, given in (("seconds", seconds), ("megabytes", megabytes))
    }
    for label, curve in curves.items():
        for name, budget in budgets.items():
            if curve[name][-1] < budget:
                raise ValueError(
                    f"{label} has ended at {curve[name][-1]:g} {name}, before {name}={budget:g}: lower it, leave it out, "
                    "or run more rounds"
                )
    places = {"time": "seconds", "bytes": "megabytes"}
    rows = [
        {
            "method": label,
            **{f"at_{short}": _value_by(curve, name, budgets[name]) for short, name in places.items()},
            **{
                f"at_half_{short}": _value_by(curve, name, budgets[name] / 2)
                for short, name in places.items()
            },
            "at_end": curve["metric"][-1],
            "hours": curve["seconds"][-1] / 3600,
            "megabytes": curve["megabytes"][-1],
            **_participation(Path(runs[label])),
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
    visits = read_rows(folder / "visits.csv", ("round", "bytes_down", "bytes_up", "round_end_seconds"))
    last = max(int(row["round"]) for row in visits)
    sent, ends = [0.0] * (last + 1), [math.nan] * (last + 1)
    for row in visits:
        sent[int(row["round"])] += (int(row["bytes_down"]) + int(row["bytes_up"])) / 1e6
        ends[int(row["round"])] = float(row["round_end_seconds"])
    megabytes = list(accumulate(sent))
    validated = _validated(folder, metric)
    rounds = sorted(idx for idx in validated if idx <= last)  # later ones have no visits to be paid for
    return {
        "seconds": [ends[idx] for idx in rounds],
        "megabytes": [megabytes[idx] for idx in rounds],
        "metric": [validated[idx] for idx in rounds],
    }


def _validated(folder: Path, metric: str) -> dict[int, float]:
    """Return round -> value; a round that was trained again after a stop has its last value."""
    values: dict[int, float] = {}
    for file in versions(folder, "metrics.csv"):
        rows = read_rows(file, ("epoch",))
        values |= {int(row["epoch"]): float(row[metric]) for row in rows if row["epoch"] and row.get(metric)}
    for file in folder.glob("tasks/epoch_*/scores.json"):  # metrics.csv has scores by step, without an epoch
        scores = json.loads(read_text(file))
        if metric in scores:
            # Folders count rounds that are done.
            values[int(file.parent.name.removeprefix("epoch_")) - 1] = float(scores[metric])
    if not values:
        raise ValueError(
            f"{folder}: no metrics/version_*/metrics.csv in it has {metric} of any round, and no tasks/epoch_*/scores.json: "
            "give the folder of a run with a CSVLogger called metrics that validates after its rounds "
            "(trainer.limit_val_batches above 0), or with TaskScores"
        )
    return values


def _participation(folder: Path) -> dict[str, float]:
    rows = read_rows(folder / "visits.csv", ("round", "client", "reason"))
    # Several visits of a client in a round count once.
    reasons = {(row["round"], row["client"]): row["reason"] for row in rows}
    named = [reason for reason in reasons.values() if not took_part(reason)]
    dropped = {reason: float(named.count(reason)) for reason in sorted(set(named))}
    return {"took_part": float(len(reasons) - len(named)), **dropped}


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
