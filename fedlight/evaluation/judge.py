"""Interface of judges, which choose the better of two answers to a prompt, and verdicts with both orders averaged."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from fedlight.evaluation.bootstrap import with_interval
from fedlight.evaluation.win_rate import outcomes
from fedlight.support.checks import Checked
from fedlight.support.types import Fields


class Judge(Checked, ABC):
    """Base class of judges; a subclass defines `verdicts`.

    Attributes:
        sees_order: whether the order of the two answers can change the verdict; if not, no pair is judged twice.

    Examples:
        >>> class Longer(Judge):
        ...     def verdicts(self, fields, ours, theirs):
        ...         pairs = zip(ours, theirs, strict=True)
        ...         return [float(len(a) > len(b)) if len(a) != len(b) else math.nan for a, b in pairs]
        >>> Longer().verdicts([{}] * 2, ["long", "on"], ["", "no"])
        [1.0, nan]
    """

    sees_order: bool = True

    @abstractmethod
    def verdicts(self, fields: Sequence[Fields], ours: Sequence[str], theirs: Sequence[str]) -> list[float]:
        """Compare two answers to each prompt, ours shown first.

        Args:
            fields: texts of each prompt by slot, ``(prompts,)``.
            ours: an answer to each prompt.
            theirs: another answer to each prompt.

        Returns:
            For each prompt 1 where ours is better, 0 where theirs is, 0.5 where they are equal, NaN where the judge's
            verdict could not be read.

        Raises:
            ValueError: the prompts lack a slot that the judge reads.
        """

    def announce(self, fields: Sequence[Fields], ours: Sequence[str], theirs: Sequence[str]) -> None:
        """Report the costs of the same `verdicts` beforehand, and refuse costs above the judge's limits.

        Raises:
            ValueError: a limit would be exceeded.
        """


class BothPositions:
    """Judge that compares each pair in both orders, since many judges prefer a position; once if order cannot matter.

    Zheng et al., "Judging LLM-as-a-Judge with MT-Bench and Chatbot Arena", NeurIPS 2023, https://arxiv.org/abs/2306.05685,
    section 3.4.

    Args:
        judge: judge of each order.

    Examples:
        >>> class Longer(Judge):  # and of two equally long ones the first
        ...     def verdicts(self, fields, ours, theirs):
        ...         return [float(len(a) >= len(b)) for a, b in zip(ours, theirs, strict=True)]
        >>> BothPositions(Longer()).scores([{}] * 3, ["longer", "x", "same"], ["short", "yy", "size"])
        [1.0, 0.0, 0.5]
    """

    def __init__(self, judge: Judge) -> None:
        self.judge = judge

    def verdicts(
        self, fields: Sequence[Fields], ours: Sequence[str], theirs: Sequence[str]
    ) -> tuple[list[float], list[float]]:
        """Return the verdicts with our answers shown first and those with ours second; 1 means ours in both."""
        if not self.judge.sees_order:
            once = self.judge.verdicts(fields, ours, theirs)
            return once, list(once)
        second = self.judge.verdicts(fields, theirs, ours)
        # The verdicts on the second order are for the others, who were shown first.
        return self.judge.verdicts(fields, ours, theirs), [1 - verdict for verdict in second]

    def scores(self, fields: Sequence[Fields], ours: Sequence[str], theirs: Sequence[str]) -> list[float]:
        """Return one score from both orders, free of position bias; NaN where a verdict could not be read."""
        return outcomes(*self.verdicts(fields, ours, theirs))

    def announce(self, fields: Sequence[Fields], ours: Sequence[str], theirs: Sequence[str]) -> None:
        """Report the costs of both orders; see `Judge.announce`."""
        if not self.judge.sees_order:
            self.judge.announce(fields, ours, theirs)
        else:
            self.judge.announce([*fields, *fields], [*ours, *theirs], [*theirs, *ours])


def check_slots(slots: Sequence[str], fields: Sequence[Fields], who: str) -> None:
    """Raise ValueError if a prompt lacks a slot that the judge ``who`` reads."""
    for texts in fields:
        if missing := [slot for slot in slots if slot not in texts]:
            raise ValueError(
                f"{who} reads {{{missing[0]}}}, but the prompts have {', '.join(texts)}: set the columns of the prompts"
            )


def judge_both_orders(
    orders: np.ndarray, log_odds: np.ndarray, labels: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return which examples are right when each selector's verdict is the mean of both orders.

    Orders 2c and 2c + 1 are the two orders of comparison c; ``log_odds``, ``(examples, U)``, are the log-probability of B
    less that of A by each of U selectors, an odd number; ``labels`` are 0 where A is better and 1 where B is.

    Returns:
        For the examples whose other order is among them: 1 where the majority of the selectors is right, 0 where it is
        wrong and 0.5 where it is undecided, ``(judged,)``; and their comparisons c, ``(judged,)``.

    Examples:
        >>> right, comparisons = judge_both_orders(np.array([0, 1, 4]), np.array([[0.5], [2], [1]]), np.array([0, 1, 1]))
        >>> right.tolist(), comparisons.tolist()  # B is preferred by 0.5 shown second, and by -2 shown first
        ([1.0, 1.0], [0, 0])
    """
    others, judged = _other_orders(orders)
    both = log_odds[judged] - log_odds[others[judged]]  # [judged, U], twice the mean of both orders
    verdict = np.sign(np.sign(both).sum(axis=1))  # the majority of the selectors
    right = (1 + verdict * (2 * labels[judged] - 1)) / 2  # labels 0 and 1 as -1 and 1
    return right, orders[judged] // 2


def calibrate_letters(orders: np.ndarray, log_odds: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Return a selector's constant preference for B, in nats, and the temperature that fits it to labels.

    After Zhao et al., "Calibrate Before Use", ICML 2021, https://arxiv.org/abs/2102.09690, with the two orders of pairs in
    place of an empty input: the prior is the mean log-odds over both orders. The temperature T, at most 100, has the lowest
    cross-entropy of half the difference of both orders divided by T.

    Args:
        orders: 2c and 2c + 1 for the two orders of comparison c, both there, ``(examples,)``.
        log_odds: log-probability of B less that of A, ``(examples,)``.
        labels: 0 where A is better and 1 where B is, ``(examples,)``.

    Raises:
        ValueError: an order of a comparison is missing.

    Examples:
        >>> log_odds = np.array([2.0, 4.0, 4.0, 2.0, 2.5, 3.5, 3.0, 3.0])
        >>> prior, temperature = calibrate_letters(np.arange(8), log_odds, np.array([0, 1, 1, 0, 1, 0, 0, 1]))
        >>> prior, round(temperature, 2)
        (3.0, 0.64)
    """
    from scipy.optimize import minimize_scalar

    others, known = _other_orders(orders)
    if len(known) < len(orders):
        raise ValueError(
            "letters are calibrated on both orders of each pair, but one is missing: predict all of them"
        )
    other = log_odds[others]
    margins = (log_odds - other) / 2 * (2 * labels - 1)  # above 0 where the selector agrees with the label
    minimum = minimize_scalar(
        lambda log_t: np.logaddexp(0, -margins / np.exp(log_t)).mean(),
        bounds=(-math.log(100), math.log(100)),  # reached if the difference predicts no label
        method="bounded",
    )
    return float((log_odds + other).mean() / 2), float(np.exp(minimum.x))


def _other_orders(orders: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where the other order of each example is, ``(examples,)``, and the examples for which there is one."""
    known, first = np.unique(orders, return_index=True)
    # The orders of a comparison are 2c and 2c + 1, which differ in the last bit. searchsorted may point past the last.
    place = np.searchsorted(known, orders ^ 1).clip(max=max(len(known) - 1, 0))
    return first[place], np.flatnonzero(known[place] == orders ^ 1)


def summarize_both_orders(right: np.ndarray, comparisons: np.ndarray) -> dict[str, float]:
    """Return the mean of the verdicts of `judge_both_orders` and its 95 % interval over comparisons; nothing without one.

    The mean is NaN, without an interval, where a verdict is NaN. One comparison alone has no interval.

    Returns:
        The mean under the empty name, the ends under ``_low`` and ``_high``: endings of a metric's name.

    Examples:
        >>> summarize_both_orders(np.array([1.0, 1.0, 1.0]), np.array([0, 0, 1]))
        {'': 1.0, '_low': 1.0, '_high': 1.0}
    """
    if not len(right):
        return {}
    # Draws follow the order of the comparisons, which several processes change.
    sort = np.argsort(comparisons, kind="stable")
    ends = {} if np.isnan(right).any() else with_interval("", right[sort], comparisons[sort])
    return ends | {"": float(right.mean())}
