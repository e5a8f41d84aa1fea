"""Win rates, from scores of single answers or from verdicts on pairs, one for each order of showing a pair.

Judges prefer positions, so each pair is judged twice. A pair is won if both verdicts together favor us: two wins, or a win
and a tie; a win and a loss make a tie. This is the count of Chen et al., "AlpaGasus", ICLR 2024,
https://arxiv.org/abs/2307.08701; the paper on FewFedPIT (https://arxiv.org/abs/2403.06131, section 4.1) judges both orders
too, but does not say how it counts. With ``in_both`` a pair is won only if both orders say so: Zheng et al., "Judging
LLM-as-a-Judge", NeurIPS 2023, https://arxiv.org/abs/2306.05685, section 3.4.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedlight.evaluation.bootstrap import bootstrap_interval


class WinTieLose(NamedTuple):
    """Shares of the pairs with two readable verdicts; NaN without such a pair."""

    pairs: int  # number of these pairs
    unread: int  # number of other pairs, those with a verdict that could not be read
    win: float  # share won by us, in [0, 1]
    tie: float  # share of ties
    lose: float  # share won by the others
    wt: float  # ``win + tie``, the papers' score
    win_stderr: float  # standard error of ``win`` over the prompts; NaN for a single prompt
    wt_stderr: float  # standard error of ``wt``
    # position bias: share of the pairs where the other order changed the verdict, in [0, 1]
    order_changed: float
    prefers_first: float  # its direction: mean verdict for the answer that was shown first; 0.5 without bias
    win_rate: float  # ``win + tie / 2``
    # lower end of its 95 % interval, by the bootstrap over prompts; NaN for a single prompt
    win_rate_low: float
    win_rate_high: float  # upper end


def wins(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return 1 for each prompt where our answer scores higher, 0.5 for a tie, else 0.

    Both scores are ``(prompts,)``, for answers to the same prompts; ValueError for unequal numbers.

    Examples:
        >>> wins([2.0, 1.0, 0.0], [1.0, 1.0, 1.0])
        [1.0, 0.5, 0.0]
    """
    return [(a > b) + 0.5 * (a == b) for a, b in zip(ours, theirs, strict=True)]


def outcomes(ours_first: Sequence[float], ours_second: Sequence[float], in_both: bool = False) -> list[float]:
    """Return each pair's outcome: 1 for a win, 0.5 for a tie, 0 for a loss, NaN if a verdict could not be read.

    Arguments are those of `win_tie_lose`.

    Examples:
        >>> outcomes([1.0, 1.0, 1.0, 0.5, math.nan], [1.0, 0.5, 0.0, 0.0, 1.0])
        [1.0, 1.0, 0.5, 0.0, nan]
    """
    first, second = np.asarray(ours_first, dtype=float), np.asarray(ours_second, dtype=float)
    won, lost = _won(first, second, in_both), _won(1 - first, 1 - second, in_both)
    scores: list[float] = np.where(np.isnan(first + second), math.nan, 0.5 * (1 + won - 1.0 * lost)).tolist()
    return scores


def win_tie_lose(
    ours_first: Sequence[float],
    ours_second: Sequence[float],
    in_both: bool = False,
    prompts: Sequence[int] | None = None,
    seed: int = 0,
) -> WinTieLose:
    """Count the outcomes of pairs that were judged in both orders.

    Args:
        ours_first: verdicts with our answer shown first, ``(pairs,)``: 1 where it is better, 0 where the other is, 0.5 where
            they are equal, NaN where the verdict could not be read.
        ours_second: verdicts on the same pairs with ours shown second; 1 still means that ours is better.
        in_both: a win or loss counts only if both orders agree on it, else it is a tie.
        prompts: prompt of each pair. Pairs of one prompt are not independent, so standard errors are those of the prompts'
            means. None: every pair has a different prompt.
        seed: of the bootstrap.

    Raises:
        ValueError: no pair, or not the same number of each.

    Examples:
        >>> shares = win_tie_lose([1.0, 1.0, 1.0, 0.0], [1.0, 0.5, 0.0, 0.0])
        >>> shares.win, shares.tie, shares.lose, shares.wt
        (0.5, 0.25, 0.25, 0.75)
        >>> shares.order_changed, shares.prefers_first
        (0.5, 0.6875)
        >>> win_tie_lose([1.0, 1.0, 1.0, 0.0], [1.0, 0.5, 0.0, 0.0], in_both=True).win
        0.25
    """
    if not len(ours_first) or len(ours_first) != len(ours_second):
        raise ValueError(
            f"win_tie_lose needs the same pairs twice, got {len(ours_first)} and {len(ours_second)} verdicts"
        )
    prompt_ids = np.arange(len(ours_first)) if prompts is None else np.asarray(prompts)
    if len(prompt_ids) != len(ours_first):
        raise ValueError(
            f"win_tie_lose has {len(ours_first)} pairs, but {len(prompt_ids)} prompts: give one for each"
        )
    each = np.array(outcomes(ours_first, ours_second, in_both))
    read = ~np.isnan(each)
    first, second, each = np.asarray(ours_first)[read], np.asarray(ours_second)[read], each[read]
    low, high = bootstrap_interval(each, prompt_ids[read], seed=seed)
    return WinTieLose(
        pairs=int(read.sum()),
        unread=int((~read).sum()),
        win=_mean(each == 1),
        tie=_mean(each == 0.5),
        lose=_mean(each == 0),
        wt=_mean(each > 0),
        win_stderr=_standard_error(each == 1, prompt_ids[read]),
        wt_stderr=_standard_error(each > 0, prompt_ids[read]),
        order_changed=_mean(first != second),
        prefers_first=_mean((first + 1 - second) / 2),  # in the second order theirs was shown first
        win_rate=_mean(each),
        win_rate_low=low,
        win_rate_high=high,
    )


def _won(first: np.ndarray, second: np.ndarray, in_both: bool) -> np.ndarray:
    # A sum above 1: two wins, or a win and a tie.
    return (first > 0.5) & (second > 0.5) if in_both else first + second > 1


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else math.nan


def _standard_error(values: np.ndarray, prompts: np.ndarray) -> float:
    _, index = np.unique(prompts, return_inverse=True)
    means = np.bincount(index, values) / np.bincount(index)
    return float(np.std(means, ddof=1) / math.sqrt(len(means))) if len(means) > 1 else math.nan
