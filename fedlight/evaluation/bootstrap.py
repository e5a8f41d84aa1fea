"""Confidence intervals of means: by the percentile bootstrap over prompts, and Student's t over seeds.

Efron, "Bootstrap Methods: Another Look at the Jackknife", Annals of Statistics 7, 1979; the percentile interval of Efron
and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13. Seeds are few, too few for percentiles: five seeds have
only 126 different resamples. Their means are compared by Student's t of the paired differences ("The Probable Error of a
Mean", Biometrika 6, 1908).
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

    A share of 0 or 1 has an interval of width 0, because every resample has the same share; it is still uncertain.

    Args:
        values: one for each answer, such as scores of a judge, ``(answers,)``; NaN is left out.
        prompts: prompt of each answer; None: each answer has a different prompt.
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
    prompt_index = np.array([indices.setdefault(name, len(indices)) for name in names], dtype=np.int64)
    if len(prompt_index) != len(numbers):
        raise ValueError(
            f"bootstrap_interval has {len(numbers)} values, but {len(prompt_index)} prompts: give one for each"
        )
    known = ~np.isnan(numbers)
    _, index = np.unique(prompt_index[known], return_inverse=True)
    # Answers to one prompt are not independent, so prompts are drawn, each with all of its answers.
    sums, counts = np.bincount(index, numbers[known]), np.bincount(index)  # [prompts]
    if len(counts) < 2:
        return Interval(math.nan, math.nan)
    means = _draw_means(sums, counts, draws, seed)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high))


def with_interval(
    name: str, values: Sequence[float] | np.ndarray, prompts: Sequence[Hashable] | np.ndarray | None = None
) -> dict[str, float]:
    """Return the mean of values as a column of a table, with the ends of its interval, absent where it is not defined.

    Args:
        name: of the column; the ends are ``NAME_low`` and ``NAME_high``.
        values: none of them NaN, ``(answers,)``, at least one.
        prompts: as of `bootstrap_interval`.

    Examples:
        >>> with_interval("won", [0.5, 0.5]), with_interval("won", [1.0])
        ({'won': 0.5, 'won_low': 0.5, 'won_high': 0.5}, {'won': 1.0})
    """
    ends = bootstrap_interval(values, prompts)
    row = {name: float(np.mean(values)), f"{name}_low": ends.low, f"{name}_high": ends.high}
    return {column: value for column, value in row.items() if not math.isnan(value)}


def student_interval(values: Sequence[float] | np.ndarray) -> Interval:
    """Return Student's interval of 95 % of the mean of independent values, one for each seed; NaN with fewer than two.

    ``values``, ``(seeds,)``, are for example one method's score minus another's.

    Examples:
        >>> low, high = student_interval([0.1, 0.2, 0.3])  # 0.2 ± 4.303 * 0.1 / sqrt(3)
        >>> round(low, 5), round(high, 5)
        (-0.04841, 0.44841)
    """
    numbers = np.asarray(values, dtype=float)
    if len(numbers) < 2:
        return Interval(math.nan, math.nan)
    half = _quantile(0.975, len(numbers)) * float(numbers.std(ddof=1)) / math.sqrt(len(numbers))
    return Interval(float(numbers.mean()) - half, float(numbers.mean()) + half)


def seeds_needed(deviation: float, difference: float) -> int:
    """Return the least number of seeds whose interval of 95 % tells a mean difference from zero in 80 % of cases.

    It is the least n with ``(t(0.975) + t(0.8)) * deviation / sqrt(n) <= difference``, with quantiles of Student's t of
    n - 1 degrees of freedom.

    Args:
        deviation: standard deviation over seeds of the paired difference, finite and at least 0.
        difference: least difference to be told from zero, above 0.

    Raises:
        ValueError: a number is out of range.

    Examples:
        >>> seeds_needed(0.05, 0.03), seeds_needed(0.1, 0.03)
        (24, 90)
    """
    if not (0 <= deviation < math.inf and difference > 0):
        raise ValueError(
            f"deviation={deviation} must lie in [0, inf), and difference={difference} be above 0"
        )

    def tell(number: int) -> bool:
        quantiles = _quantile(0.975, number) + _quantile(0.8, number)
        return quantiles * deviation <= difference * math.sqrt(number)

    few, enough = 1, 2  # one difference has no standard deviation
    while not tell(enough):
        few, enough = enough, 2 * enough
    while enough - few > 1:  # differences of perplexities may need billions
        middle = (few + enough) // 2
        few, enough = (few, middle) if tell(middle) else (middle, enough)
    return enough


def _quantile(share: float, number: int) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(float(number - 1), share))


def _draw_means(sums: np.ndarray, counts: np.ndarray, draws: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(derive_seed(seed, "bootstrap"))
    size, means = len(counts), []
    step = max(1, CELLS // size)
    for start in range(0, draws, step):
        # A mean depends on how often each prompt is drawn, so their order is not drawn.
        times = rng.multinomial(size, np.full(size, 1 / size), size=min(step, draws - start))
        means.append((times @ sums) / (times @ counts))  # times: [draws of this step, prompts]
    return np.concatenate(means)
