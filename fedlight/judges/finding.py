"""Answer of a table of results in one sentence: the best method, its baseline, and whether chance explains the difference.

The baseline is the first method of the table. Methods that know the answers, such as an oracle, are ceilings and never win.
A difference over seeds is compared with Student's interval (see `fedlight.evaluation.bootstrap`); a win rate of a single
seed with its own interval over prompts.
"""

import math
import re
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from fedlight.evaluation.bootstrap import Interval, student_interval
from fedlight.support.results import mark

MEASURES = ("win_rate_vs", "^win_rate$", "win_rate", "^own$", "^both_orders$", "accuracy", "score", "utility")
"""Columns in which more is better, the most telling one first."""
WORDS = {"own": "mean accuracy over clients", "both_orders": "accuracy in both orders"}
CEILING = re.compile(r"oracle|perfect|saw all votes")
UNTRAINED = re.compile(r"raw|zero-shot|pre-trained|nothing learned")
OTHER_ROWS = "differences: "
"""Beginning of the name in rows about pairs of methods."""

Rows = Sequence[Mapping[str, Any]]


def finding(rows: Rows) -> str:
    """Return the sentence; empty where no column is known to be better when it is larger.

    Rows have ``method``, ``seed`` and measures; the ends of an interval of ``x`` are ``x_low`` and ``x_high``.

    Examples:
        >>> tuned = {"method": "FedBis", "win_rate": 0.755, "win_rate_low": 0.72, "win_rate_high": 0.792}
        >>> finding([{"method": "raw", "win_rate": 0.5}, tuned])
        'FedBis: tuned answers win 75.5 % [72.0, 79.2] against the raw model.'
        >>> finding([{"method": "raw", "accuracy": 0.51}, {"method": "selector", "accuracy": 0.83}])
        'selector: accuracy 0.830, before training 0.510. With one seed, chance is not ruled out.'
    """
    # Win rates by a selector at chance are no answer.
    rows = [
        {name: row[name] for name in row if "worthless" not in name and not mark([row], name)} for row in rows
    ]
    methods = dict.fromkeys(str(row["method"]) for row in rows)
    methods = dict.fromkeys(name for name in methods if not name.startswith(OTHER_ROWS))
    for pattern in MEASURES:
        for column in dict.fromkeys(name for row in rows for name in row if re.search(pattern, name)):
            scores = {name: values for name in methods if (values := by_seed(rows, name, column))}
            rivals = [name for name in scores if not CEILING.search(name)]
            # The baseline is the first method, so a column that it lacks compares nothing.
            if len(rivals) > 1 and rivals[0] == next(iter(methods)):
                return _compared(rows, column, {name: scores[name] for name in rivals})
    return ""


def by_seed(rows: Rows, method: str, column: str) -> dict[str, float]:
    """Return the mean of a method's finite numbers in a column, by seed."""
    values: dict[str, list[float]] = {}
    for row in rows:
        value = row.get(column)
        # True is an int for Python.
        if row["method"] != method or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if math.isfinite(value):
            values.setdefault(str(row.get("seed")), []).append(float(value))
    return {seed: fmean(numbers) for seed, numbers in values.items()}


def _compared(rows: Rows, column: str, scores: Mapping[str, Mapping[str, float]]) -> str:
    base, *others = scores  # the first method is the baseline
    best = max(others, key=lambda name: fmean(scores[name].values()))
    ours, theirs = [*scores[best].values()], [*scores[base].values()]
    number = len(ours)
    if column.startswith("win_rate"):
        ends = _win_rate_ends(rows, best, column, ours)
        text = _wins(best, base, len(others), fmean(ours), ends)
        chance = Interval(ends.low - 0.5, ends.high - 0.5)  # 0.5: no better than the raw model
    else:
        shared = [seed for seed in scores[best] if seed in scores[base]]  # differences are paired by seed
        if number := len(shared):
            ours, theirs = ([scores[name][seed] for seed in shared] for name in (best, base))
        words = WORDS.get(column, column.replace("_", " "))
        text = _beats({best: fmean(ours), base: fmean(theirs)}, len(others), words)
        chance = student_interval([a - b for a, b in zip(ours, theirs, strict=True)] if number else [])
    seeds = f" over {number} seeds" if number > 1 else ""
    return f"{text}{seeds}{noise(chance, number)}"


def noise(chance: Interval, seeds: int) -> str:
    """Return the end of the sentence: whether an interval of differences leaves out zero.

    Examples:
        >>> noise(Interval(-0.1, 0.2), 3), noise(Interval(0.1, 0.2), 3), noise(Interval(0.1, 0.2), 1)
        (', within noise.', ', beyond noise.', '.')
    """
    if math.isnan(chance.low):  # fewer than two differences
        return ". With one seed, chance is not ruled out." if seeds == 1 else ". No seed has both."
    if chance.low <= 0 <= chance.high:
        return ", within noise."
    return ", beyond noise." if seeds > 1 else "."


def _win_rate_ends(rows: Rows, method: str, column: str, values: Sequence[float]) -> Interval:
    """Return Student's interval over the seeds; of a single seed, the interval in its row."""
    if len(values) > 1:
        low, high = student_interval(values)
        return Interval(max(low, 0.0), min(high, 1.0))  # Student's may leave [0, 1]
    ends = [value for end in ("low", "high") for value in by_seed(rows, method, f"{column}_{end}").values()]
    return Interval(*ends) if len(ends) == 2 else Interval(math.nan, math.nan)


def _wins(best: str, base: str, others: int, rate: float, ends: Interval) -> str:
    against = "the raw model" if UNTRAINED.search(base) else base
    first = f"{best}: tuned answers win" if others == 1 else f"{best} wins most of {others} methods:"
    return f"{first} {win_share(rate, ends)} against {against}"


def win_share(rate: float, ends: Interval) -> str:
    """Return a win rate in percent with its interval, where that is known.

    Examples:
        >>> win_share(0.755, Interval(0.72, 0.792)), win_share(0.5, Interval(math.nan, math.nan))
        ('75.5 % [72.0, 79.2]', '50.0 %')
    """
    interval = "" if math.isnan(ends.low) else f" [{100 * ends.low:.1f}, {100 * ends.high:.1f}]"
    return f"{100 * rate:.1f} %{interval}"


def _beats(means: Mapping[str, float], others: int, words: str) -> str:
    # Of several methods the baseline may be the best.
    ranked = sorted(means.items(), key=lambda pair: -pair[1]) if others > 1 else means.items()
    (best, ours), (base, theirs) = ranked
    if others > 1:
        return (
            f"{best} has the best {words} of {others + 1} methods: {ours:.3f} against {theirs:.3f} of {base}"
        )
    if UNTRAINED.search(base):
        return f"{best}: {words} {ours:.3f}, before training {theirs:.3f}"
    return f"{best}: {words} {ours:.3f} against {theirs:.3f} of {base}"
