"""Reader of ``attacks/attacks.csv``, which the attack callbacks write into a run's folder."""

import math
from pathlib import Path
from statistics import fmean

from fedlight.runs.rows import read_rows

GLOBAL = "global"
UPLOADS = "uploads"
KEYS = ("round", "target")

Leakage = dict[int, dict[str, float]]
"""Rounds that were done -> metric -> value; 0 is before training."""


def read_attacks(folder: str, target: str = GLOBAL, needed: bool = True) -> Leakage:
    """Return what attacks found in the global model, or in clients' uploads, by round, in order.

    Args:
        folder: of a run with attack callbacks.
        target: ``global``, a client's id, or ``uploads``: the mean over all clients' uploads of a round.
        needed: raise ValueError for a run without the target, instead of returning nothing.
    """
    file = Path(folder) / "attacks" / "attacks.csv"
    rows = read_rows(file, KEYS)
    found: dict[int, dict[str, list[float]]] = {}
    for row in rows:
        if row["target"] == target or (target == UPLOADS and row["target"] != GLOBAL):
            metrics = found.setdefault(int(row["round"]), {})
            for name, value in row.items():
                if name not in KEYS and value and not math.isnan(float(value)):
                    metrics.setdefault(name, []).append(float(value))
    if not found and needed:
        targets = ", ".join(sorted({row["target"] for row in rows})[:5])
        raise ValueError(
            f"{file}: there is no row of target={target!r}, but of {targets}: choose one of these"
        )
    return {
        number: {name: fmean(values) for name, values in found[number].items()} for number in sorted(found)
    }


def metric_of(leakage: Leakage, metric: str, folder: str) -> dict[int, float]:
    """Return one metric by round; raise ValueError for one that was never measured."""
    values = {number: metrics[metric] for number, metrics in leakage.items() if metric in metrics}
    if not values:
        known = ", ".join(sorted({name for metrics in leakage.values() for name in metrics})) or "none"
        raise ValueError(f"{folder}/attacks/attacks.csv has no {metric!r}; its metrics are {known}")
    return values
