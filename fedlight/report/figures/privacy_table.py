"""Table of privacy and utility, a stage of recipes: the score of each method's model, and the findings of attacks on it.

The attack callbacks write their findings into ``attacks/attacks.csv`` in a run's folder.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fedlight.runs.rows import read_rows
from fedlight.support.files import result_of
from fedlight.support.results import rich_text

PRETRAINED = "pre-trained"
WINS = ("win", "tie", "lose", "wt")


def privacy_table(
    methods: dict[str, str],
    task: str,
    attacks: dict[str, str] | None = None,
    targets: list[str] | None = None,
    not_attacked: list[str] | None = None,
    zero_shot: str | None = None,
    wins: str | None = None,
    if_run: list[str] | None = None,
) -> dict[str, Any]:
    """Return a row of utility and leakage for each method.

    Args:
        methods: method -> folder of its run, a stage of the recipe.
        task: whose score is the utility. Where the clients' own models were scored, it is their mean.
        attacks: column of ``attacks/attacks.csv``, such as ``discoverable_memorization/rouge_l``, -> its name here; None:
            all there are, by their own names.
        targets: whose leakage, ``global`` alone if not given, or ``uploads`` as well, whose columns end in `` of uploads``.
            A run without uploads has nothing there.
        not_attacked: methods whose runs have no attacks, as nothing leaves their clients.
        zero_shot: folder of the stage that tested the model before training. It gives a row ``pre-trained``, whose leakage
            was found before training by the attacks of the first run that began with them.
        wins: folder of a stage that called `fedlight.judges.duels.duels`; its shares become columns.
        if_run: methods that are left out where their folder does not exist, because the settings leave their stages out.

    Returns:
        ``rows`` with ``method``, ``utility``, the shares of wins, and the value of each attack at its last round; a
        ``report``. Unknown values of a method are left out.

    Raises:
        ValueError: a run is not done, has not scored the task, or was not attacked.
    """
    shares = {} if wins is None else {row["method"]: row for row in result_of(wins)["rows"]}
    whose = targets or [GLOBAL]
    methods = {
        name: folder
        for name, folder in methods.items()
        if name not in (if_run or []) or Path(folder).is_dir()
    }
    rows: list[dict[str, Any]] = []
    before: dict[str, float] = {}
    for method, folder in methods.items():
        row = _row(method, folder, task, shares)
        for target in [] if method in (not_attacked or []) else whose:
            leakage = read_attacks(folder, target, needed=target == GLOBAL)  # some runs have no uploads
            # The last value of each metric: attacks need not be made at the same rounds.
            last = {name: values[max(values)] for name, values in leakage.items()}
            row |= _named(last, attacks, target)
            if target == GLOBAL and not before:  # of the first run that has it; all begin with one model
                before = {name: values[0] for name, values in leakage.items() if 0 in values}
        rows.append(row)
    if zero_shot is not None:
        rows.insert(0, _row(PRETRAINED, zero_shot, task, shares) | _named(before, attacks, GLOBAL))
    _check(rows, attacks, whose, set(methods) - set(not_attacked or []))
    names = list(dict.fromkeys(name for row in rows for name in row if name != "method"))
    lines = [[row["method"], *(f"{row[n]:.3f}" if n in row else "-" for n in names)] for row in rows]
    return {"rows": rows, "report": rich_text("utility and leakage", ["method", *names], lines)}


def _row(method: str, folder: str, task: str, shares: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    won = shares.get(method, {})
    return {"method": method, "utility": utility(folder, task)} | {n: won[n] for n in WINS if n in won}


def utility(folder: str, task: str) -> float:
    """Return a finished stage's score, the mean over clients' own models if scored; raise ValueError without a score."""
    metrics: dict[str, float] = result_of(folder).get("metrics", {})
    for name in (f"own/{task}/client_mean", f"score/{task}"):
        if name in metrics:
            return metrics[name]
    remedy = f"it has {', '.join(metrics) or 'none'}: add the callback TaskScores with this task"
    raise ValueError(f"{folder} has no metric {name!r}; {remedy}")


def _named(metrics: Mapping[str, float], attacks: Mapping[str, str] | None, target: str) -> dict[str, float]:
    called = dict.fromkeys(metrics) if attacks is None else attacks  # None: by their own names
    return {_column(called[name] or name, target): x for name, x in metrics.items() if name in called}


def _column(name: str, target: str) -> str:
    return name if target == GLOBAL else f"{name} of {target}"


def _check(
    rows: Sequence[Mapping[str, Any]],
    attacks: Mapping[str, str] | None,
    targets: Sequence[str],
    attacked: Collection[str],
) -> None:
    """Raise ValueError for a column that was asked for and is not in the table."""
    columns = {name for row in rows for name in row} - {"method", "utility", *WINS}
    wanted = {_column(called, target): name for target in targets for name, called in (attacks or {}).items()}
    if missing := [column for column in wanted if column not in columns and attacked]:
        raise ValueError(
            f"attacks: no run has {wanted[missing[0]]!r} for a column {missing[0]!r}; there are "
            f"{', '.join(sorted(columns)) or 'none'}"
        )
    for target in targets:
        if attacked and target != GLOBAL and not any(name.endswith(f" of {target}") for name in columns):
            raise ValueError(
                f"targets={[*targets]}: no run was attacked on {target}: set targets of its attacks"
            )


GLOBAL = "global"
UPLOADS = "uploads"
KEYS = ("round", "target")

Leakage = dict[str, dict[int, float]]
"""Metric -> rounds that were done, in order -> value; 0 is before training."""


def read_attacks(folder: str, target: str = GLOBAL, needed: bool = True) -> Leakage:
    """Return what attacks found in a run: in the ``global`` model, a client's uploads, or the mean of a round's ``uploads``.

    Without the target nothing is returned, unless it is ``needed``: then a ValueError is raised.
    """
    file = Path(folder) / "attacks" / "attacks.csv"
    rows = read_rows(file, KEYS)
    of_target = [r for r in rows if r["target"] == target or (target == UPLOADS and r["target"] != GLOBAL)]
    if not of_target and needed:
        targets = ", ".join(sorted({row["target"] for row in rows})[:5])
        raise ValueError(
            f"{file}: there is no row of target={target!r}, but of {targets}: choose one of these"
        )
    uploads: dict[str, dict[int, list[float]]] = {}
    for row in sorted(of_target, key=lambda row: int(row["round"])):
        for name, value in row.items():
            if name not in KEYS and value and not math.isnan(float(value)):
                uploads.setdefault(name, {}).setdefault(int(row["round"]), []).append(float(value))
    return {name: {number: fmean(x) for number, x in rounds.items()} for name, rounds in uploads.items()}


def metric_of(leakage: Leakage, metric: str, folder: str) -> dict[int, float]:
    """Return one metric by round; raise ValueError for one that was never measured."""
    if metric not in leakage:
        known = ", ".join(sorted(leakage)) or "none"
        raise ValueError(f"{folder}/attacks/attacks.csv has no {metric!r}; its metrics are {known}")
    return leakage[metric]
