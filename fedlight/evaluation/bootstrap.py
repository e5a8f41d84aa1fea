"""Confidence intervals of means by the percentile bootstrap over prompts.

Efron, "Bootstrap Methods: Another Look at the Jackknife", Annals of Statistics 7, 1979; the percentile interval of Efron
and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13. Answers to one prompt are not independent, so
prompts are drawn, each with all of its answers.
"""

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from fedlight.support.seeding import derive_seed

CELLS = 2_000_000  # draws x prompts held in memory at a time


class Interval(NamedTuple):
    """Ends of a confidence interval; NaN where it is not defined."""

    low: float
    high: float


def bootstrap_interval(
    values: Sequence[float] | np.ndarray,
    prompts: Sequence[Hashable] | np.ndarray | None = None,
    level: float = 0.95,
    draws: int = 2000,
    seed: int = 0,
) -> Interval:
    """Return the interval of the mean of values under resampled prompts; NaN with fewer than two prompts.

    A share of 0 or 1 has an interval of width 0, as every resample has the same share; it is not known exactly for that.

    Args:
        values: one for each answer, such as scores of a judge, ``(answers,)``; NaN is left out.
        prompts: prompt of each answer; None: each answer has a prompt of its own.
        level: of confidence, in (0, 1).
        draws: number of resamples, of as many prompts as there are, with replacement; at least 1.
        seed: of the resamples.

    Raises:
        ValueError: a setting is out of range, or the numbers of prompts and values differ.

    Examples:
        >>> bootstrap_interval([1.0, 0.0, 1.0, 1.0], prompts=["a", "a", "b", "b"], level=0.4)  # 0.5, 0.75 or 1
        Interval(low=0.75, high=0.75)
    """
    if not 0 < level < 1 or draws < 1:
        raise ValueError(f"level={level} must lie between 0 and 1, and draws={draws} be at least 1")
    numbers = np.asarray(values, dtype=float)
    indices: dict[Hashable, int] = {}
    names = range(len(numbers)) if prompts is None else prompts
    of = np.array([indices.setdefault(name, len(indices)) for name in names], dtype=np.int64)
    if len(of) != len(numbers):
        raise ValueError(
            f"bootstrap_interval has {len(numbers)} values, but {len(of)} prompts: give one for each"
        )
    known = ~np.isnan(numbers)
    _, index = np.unique(of[known], return_inverse=True)
    sums, counts = np.bincount(index, numbers[known]), np.bincount(index)
    if len(counts) < 2:
        return Interval(math.nan, math.nan)
    means = _draw_means(sums, counts, draws, seed)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high))


def _draw_means(sums: np.ndarray, counts: np.ndarray, draws: int, seed: int) -> np.ndarray:
    """Return the mean over all answers of the drawn prompts, ``(draws,)``."""
    rng = np.random.default_rng(derive_seed(seed, "bootstrap"))
    size, means = len(counts), []
    step = max(1, CELLS // size)
    for start in range(0, draws, step):
        times = rng.multinomial(size, np.full(size, 1 / size), size=min(step, draws - start))
        means.append((times @ sums) / (times @ counts))
    return np.concatenate(means)
