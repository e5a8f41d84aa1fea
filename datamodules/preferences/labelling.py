"""Preference labels of completion pairs, by the majority of selectors.

Section 4 of Wu et al., "Towards Federated RLHF with Aggregated Client Preference for LLMs", ICLR 2025,
https://arxiv.org/abs/2407.03038: all n (n - 1) / 2 pairs of a prompt's n completions are compared by every selector, and
the majority of the selectors labels the pair. Deviation, on by default: a selector's log-probabilities of both orders are
averaged (``orders="both"``), which cancels a preference for the first position. Every labelled pair is kept.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

import numpy as np

from fedlight.datamodules.rows.rows import RowsError
from fedlight.datamodules.text.encoding import Comparison
from fedlight.support.files import result_of
from fedlight.support.types import Row, Rows

Orders = Literal["one", "both"]


@dataclass(frozen=True)
class LabelCounts:
    """Counts of labelled and unlabelled pairs; ``str`` gives them in one line."""

    first_won: int
    second_won: int
    undecided: int
    unread: int

    def __str__(self) -> str:
        return (
            f"{self.first_won + self.second_won:,} labelled pairs (first answer won {self.first_won:,}, second "
            f"{self.second_won:,}); left out: {self.undecided:,} undecided, {self.unread:,} not read by every "
            "selector"
        )


def form_pairs(rows: Rows, source: str) -> tuple[list[Comparison], int]:
    """Return all pairs of different completions of each prompt, in order.

    A row has ``completions``, a list of texts, and ``fields`` (slot -> text) or else ``prompt``; ``source`` names the rows.

    Returns:
        Pairs, and the number of skipped pairs with equal or empty completions.

    Raises:
        RowsError: a row has no list of completions or no prompt, or no pair remains.

    Examples:
        >>> pairs, skipped = form_pairs([{"prompt": "x", "completions": ["u", "v", "u "]}], "rows")
        >>> [(pair.first, pair.second) for pair in pairs], skipped
        ([('u', 'v'), ('v', 'u')], 1)
    """
    pairs, skipped = [], 0
    for number, row in enumerate(rows):
        fields, completions = _read_completions(row, number, source)
        for first, second in combinations(completions, 2):
            if first == second or not first or not second:
                skipped += 1
            else:
                pairs.append(Comparison(fields, first, second))
    if not pairs:
        raise RowsError(
            f"{source}: no prompt has two different completions: generate more of them, or at a higher temperature"
        )
    return pairs, skipped


def gather(predictions: Iterable[Mapping[str, Any]], num_pairs: int, orders: Orders = "both") -> np.ndarray:
    """Return each selector's log-probabilities of both answers of each pair.

    Predictions are rows with ``index`` (of the pair), ``order`` (0: the first answer is shown as A; 1: as B), ``logp_a`` and
    ``logp_b``: numbers of one selector, or lists with one number for each. ``orders="both"`` averages over both orders,
    ``"one"`` uses order 0 alone.

    Returns:
        ``(selectors, num_pairs, 2)``: log-probabilities that the first, the second answer is better; NaN for a pair
        without a prediction in a required order.

    Raises:
        RowsError: the rows differ in the number of selectors.

    Examples:
        >>> as_a = {"index": 0, "order": 0, "logp_a": -1.0, "logp_b": -2.0}
        >>> as_b = {"index": 0, "order": 1, "logp_a": -3.0, "logp_b": -0.5}
        >>> gather([as_a, as_b], num_pairs=2).tolist()
        [[[-0.75, -2.5], [nan, nan]]]
        >>> gather([{"index": 0, "order": 0, "logp_a": [-1, -3], "logp_b": [-2, -4]}], 1, "one").tolist()
        [[[-1.0, -2.0]], [[-3.0, -4.0]]]
    """
    rows = [(row["index"], row["order"], np.array([row["logp_a"], row["logp_b"]])) for row in predictions]
    counts = sorted({answers[0].size for _, _, answers in rows}) or [1]
    if len(counts) > 1:
        raise RowsError(
            f"votes: some rows are of {counts[0]} selectors, others of {counts[1]}: predict again"
        )
    by_order = np.full((num_pairs, 2, 2, counts[0]), np.nan)  # [pairs, orders, answers, selectors]
    for index, order, answers in rows:
        # Swapped, the first answer is shown as B.
        by_order[index, order] = answers.reshape(2, -1)[:: 1 if order == 0 else -1]
    return np.moveaxis(by_order[:, 0] if orders == "one" else by_order.mean(axis=1), 2, 0)


def majority(log_probs: np.ndarray) -> np.ndarray:
    """Return the answer that most selectors prefer, ``(pairs,)``: 0 for the first, 1 for the second, -1 for neither.

    ``log_probs`` are those of `gather`; a selector with equal log-probabilities does not vote.

    Raises:
        ValueError: the number of selectors is even.

    Examples:
        >>> majority(np.array([[[-1.0, -2.0]], [[-3.0, -0.1]], [[-0.5, -0.9]]])).tolist()
        [0]
    """
    if len(log_probs) % 2 == 0:
        raise ValueError(
            f"{len(log_probs)} selectors vote: an even number can tie; use an odd number, for example {len(log_probs) + 1}"
        )
    votes = np.sign(log_probs[..., 0] - log_probs[..., 1]).sum(axis=0)  # [pairs]
    return np.where(votes > 0, 0, np.where(votes < 0, 1, -1))


@dataclass(frozen=True)
class Agreement:
    """Agreement of selectors, as shares of the labelled pairs; ``str`` gives it in one line."""

    with_majority: list[float]
    pairwise: float

    def __str__(self) -> str:
        shares = ", ".join(f"{share:.3f}" for share in self.with_majority)
        return (
            f"share of labelled pairs on which a selector agrees with the label: {shares}, with another selector: "
            f"{self.pairwise:.3f}"
        )


def agreement(log_probs: np.ndarray) -> Agreement:
    """Return how often each selector agrees with the majority on labelled pairs, and with another selector.

    A pair is labelled if every selector has read it and a majority exists. A selector with equal log-probabilities (those of
    `gather`) agrees with no other. The shares in [0, 1] are one for each selector, and the mean over all pairs of selectors;
    NaN without labelled pairs, and for ``pairwise`` of one selector.

    Raises:
        ValueError: an even number of selectors.

    Examples:
        >>> margins = np.array([[1.0, 1.0, -1.0, np.nan], [1.0, -1.0, -1.0, 1.0], [1.0, 1.0, 0.0, 1.0]])
        >>> print(agreement(np.stack([margins, np.zeros((3, 4))], axis=2)))
        share of labelled pairs on which a selector agrees with the label: 1.000, 0.667, 0.667, with another selector: 0.556
    """
    votes = np.sign(log_probs[..., 0] - log_probs[..., 1])  # [selectors, pairs]
    winners = majority(log_probs)
    votes = votes[:, (winners >= 0) & ~np.isnan(votes).any(axis=0)]
    if votes.shape[1] == 0:
        return Agreement([math.nan] * len(votes), math.nan)
    sides = np.sign(votes.sum(axis=0))  # of the majority
    pairwise = [float(((first == second) & (first != 0)).mean()) for first, second in combinations(votes, 2)]
    return Agreement(
        [float((vote == sides).mean()) for vote in votes],
        sum(pairwise) / len(pairwise) if pairwise else math.nan,
    )


def label(pairs: Sequence[Comparison], log_probs: np.ndarray) -> tuple[list[dict[str, Any]], LabelCounts]:
    """Return preference rows of the pairs of `form_pairs` that the selectors decide, by the log-probabilities of `gather`.

    Returns:
        Rows with the slots of the prompt, ``response_a``, ``response_b``, ``choice`` (``"a"`` or ``"b"``), ``votes_a`` and
        ``votes_b`` (selectors) and ``margin`` (mean log-probability of the first answer minus that of the second); and the
        counts.

    Raises:
        ValueError: an even number of selectors.

    Examples:
        >>> rows, counts = label([Comparison({"prompt": "x"}, "u", "v")], np.array([[[-2.0, -0.25]]]))
        >>> rows[0]["choice"], rows[0]["votes_b"], rows[0]["margin"]
        ('b', 1, -1.75)
    """
    winners = majority(log_probs)
    margins = log_probs[..., 0] - log_probs[..., 1]  # [selectors, pairs]
    read = ~np.isnan(margins).any(axis=0)  # [pairs]
    rows = [
        {
            **pairs[pair].fields,
            "response_a": pairs[pair].first,
            "response_b": pairs[pair].second,
            "choice": "ab"[winners[pair]],
            "votes_a": int((margins[:, pair] > 0).sum()),
            "votes_b": int((margins[:, pair] < 0).sum()),
            "margin": float(margins[:, pair].mean()),
        }
        for pair in np.flatnonzero(read & (winners >= 0)).tolist()
    ]
    first, second, neither = (int((read & (winners == side)).sum()) for side in (0, 1, -1))
    return rows, LabelCounts(first, second, neither, int((~read).sum()))


def labelled(folder: str) -> dict[str, int]:
    """Return the numbers of pairs that a stage of ``label_with_selectors`` has labelled, and left out as too long."""
    counts = result_of(folder)["metrics"]
    return {"labelled": counts["label/pairs"], "too_long": counts["label/too_long"]}


def _read_completions(row: Row, number: int, source: str) -> tuple[dict[str, str], list[str]]:
    completions = row.get("completions")
    place = f"{source}, row {number + 1}"
    if not isinstance(completions, Sequence) or isinstance(completions, str):
        raise RowsError(f"{place}: no list `completions`; columns are: {', '.join(row)}")
    fields = row.get("fields") or ({"prompt": row["prompt"]} if "prompt" in row else None)
    if fields is None:
        raise RowsError(f"{place}: neither `fields` nor `prompt`; columns are: {', '.join(row)}")
    return dict(fields), [str(completion).strip() for completion in completions]
