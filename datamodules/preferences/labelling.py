"""From several completions per prompt to labelled preference pairs: who is compared, who votes, who wins.

Section 4 of Wu et al., "Towards Federated RLHF with Aggregated Client Preference for LLMs", ICLR 2025,
https://arxiv.org/abs/2407.03038: all n (n - 1) / 2 pairs of a prompt's n completions are compared by every
selector, and the majority of the selectors labels the pair. Deviation, on by default: a selector's
log-probabilities of both orders are averaged (``orders="both"``), so that a taste for the first position
cancels. Every labelled pair is kept, whichever side won.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

import numpy as np

from fedlight.datamodules.rows.rows import RowsError
from fedlight.datamodules.rows.votes import Comparison
from fedlight.support.types import Rows

Orders = Literal["one", "both"]


@dataclass(frozen=True)
class LabelCounts:
    """What became of the pairs; ``str`` gives it in one line."""

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
    """All pairs of different completions of each prompt, in order.

    Args:
        rows: each with ``completions`` (a list of texts) and ``fields`` (slot -> text) or else ``prompt``.
        source: name of the rows in messages.

    Returns:
        The pairs, and how many were skipped because the two are equal or one is empty.

    Raises:
        RowsError: a row has no list of completions or no prompt, or no pair is left.

    Example:
        >>> pairs, skipped = form_pairs([{"prompt": "x", "completions": ["u", "v", "u "]}], "rows")
        >>> [(pair.first, pair.second) for pair in pairs], skipped
        ([('u', 'v'), ('v', 'u')], 1)
    """
    pairs, skipped = [], 0
    for number, row in enumerate(rows):
        fields, completions = _prompt_and_completions(row, number, source)
        for first, second in combinations(completions, 2):
            if first == second or not first or not second:
                skipped += 1
            else:
                pairs.append(Comparison(fields, first, second))
    if not pairs:
        raise RowsError(
            f"{source}: no prompt has two different completions. Generate more of them, or at a higher temperature."
        )
    return pairs, skipped


def gather(predictions: Iterable[Mapping[str, Any]], num_pairs: int, orders: Orders = "both") -> np.ndarray:
    """Log-probabilities of the two answers of each pair, by each selector, whatever order they were shown in.

    Args:
        predictions: rows with ``index`` (of the pair), ``order`` (0: the first answer is shown as A; 1: as B),
            ``logp_a`` and ``logp_b``: numbers of one selector, or lists with one number for each.
        num_pairs: number of pairs.
        orders: ``"both"`` takes the mean over the two orders, ``"one"`` looks at order 0 alone.

    Returns:
        ``(selectors, num_pairs, 2)``: log-probabilities that the first, the second answer is better; NaN where a pair
        was not read in every order that counts.

    Raises:
        RowsError: the rows are not of equally many selectors.

    Example:
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
            f"votes: some rows are of {counts[0]} selectors, others of {counts[1]}. Write them anew."
        )
    by_order = np.full((num_pairs, 2, 2, counts[0]), np.nan)
    for index, order, answers in rows:
        by_order[index, order] = answers.reshape(2, -1)[:: 1 if order == 0 else -1]
    return np.moveaxis(by_order[:, 0] if orders == "one" else by_order.mean(axis=1), 2, 0)


def majority(log_probs: np.ndarray) -> np.ndarray:
    """The answer that most selectors prefer.

    Args:
        log_probs: ``(selectors, pairs, 2)``, of the first and the second answer.

    Returns:
        ``(pairs,)``: 0 where the first won, 1 where the second, -1 where neither (a selector that finds both equally so
        has no vote).

    Raises:
        ValueError: the number of selectors is even.

    Example:
        >>> majority(np.array([[[-1.0, -2.0]], [[-3.0, -0.1]], [[-0.5, -0.9]]])).tolist()
        [0]
    """
    if len(log_probs) % 2 == 0:
        raise ValueError(
            f"{len(log_probs)} selectors vote: an even number can tie. Use an odd number, for example "
            f"{len(log_probs) + 1}."
        )
    votes = np.sign(log_probs[..., 0] - log_probs[..., 1]).sum(axis=0)
    return np.where(votes > 0, 0, np.where(votes < 0, 1, -1))


@dataclass(frozen=True)
class Agreement:
    """How far the selectors are of one mind, in shares of the labelled pairs; ``str`` gives it in one line."""

    with_majority: list[float]
    pairwise: float

    def __str__(self) -> str:
        shares = ", ".join(f"{share:.3f}" for share in self.with_majority)
        return (
            f"share of labelled pairs on which a selector agrees with the label: {shares}, with another selector: "
            f"{self.pairwise:.3f}"
        )


def agreement(log_probs: np.ndarray) -> Agreement:
    """On how many of the labelled pairs each selector agrees with the majority, and two selectors with each other.

    Labelled are the pairs that every selector has read and on which there is a majority. A selector that finds both
    answers equally good agrees with nobody.

    Args:
        log_probs: ``(selectors, pairs, 2)``, of the first and the second answer; an odd number of selectors.

    Returns:
        Shares in [0, 1]: one for each selector, and the mean over all pairs of selectors; NaN where nothing is
        labelled, and ``pairwise`` of one selector.

    Raises:
        ValueError: an even number of selectors.

    Example:
        >>> margins = np.array([[1.0, 1.0, -1.0, np.nan], [1.0, -1.0, -1.0, 1.0], [1.0, 1.0, 0.0, 1.0]])
        >>> print(agreement(np.stack([margins, np.zeros((3, 4))], axis=2)))
        share of labelled pairs on which a selector agrees with the label: 1.000, 0.667, 0.667, with another selector: 0.556
    """
    votes = np.sign(log_probs[..., 0] - log_probs[..., 1])
    winners = majority(log_probs)
    votes = votes[:, (winners >= 0) & ~np.isnan(votes).any(axis=0)]
    if votes.shape[1] == 0:
        return Agreement([math.nan] * len(votes), math.nan)
    sides = np.sign(votes.sum(axis=0))
    pairwise = [float(((one == other) & (one != 0)).mean()) for one, other in combinations(votes, 2)]
    return Agreement(
        [float((vote == sides).mean()) for vote in votes],
        sum(pairwise) / len(pairwise) if pairwise else math.nan,
    )


def label(pairs: Sequence[Comparison], log_probs: np.ndarray) -> tuple[list[dict[str, Any]], LabelCounts]:
    """Preference rows from pairs and what the selectors say of them.

    Args:
        pairs: from `form_pairs`.
        log_probs: ``(selectors, pairs, 2)``, from `gather`.

    Returns:
        Rows with the slots of the prompt, ``response_a``, ``response_b``, ``choice`` (``"a"`` or ``"b"``),
        ``votes_a`` and ``votes_b`` (selectors) and ``margin`` (mean log-probability of the first less that of the
        second); and the counts.

    Raises:
        ValueError: an even number of selectors.

    Example:
        >>> rows, counts = label([Comparison({"prompt": "x"}, "u", "v")], np.array([[[-2.0, -0.25]]]))
        >>> rows[0]["choice"], rows[0]["votes_b"], rows[0]["margin"]
        ('b', 1, -1.75)
    """
    winners = majority(log_probs)
    margins = log_probs[..., 0] - log_probs[..., 1]
    read = ~np.isnan(margins).any(axis=0)
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


def _prompt_and_completions(
    row: Mapping[str, Any], number: int, source: str
) -> tuple[dict[str, str], list[str]]:
    completions = row.get("completions")
    if not isinstance(completions, Sequence) or isinstance(completions, str):
        raise RowsError(
            f"{source}, row {number + 1}: no list `completions`. Its columns are: {', '.join(row)}."
        )
    fields = row.get("fields") or ({"prompt": row["prompt"]} if "prompt" in row else None)
    if fields is None:
        raise RowsError(
            f"{source}, row {number + 1}: neither `fields` nor `prompt`. Its columns are: {', '.join(row)}."
        )
    return dict(fields), [str(completion).strip() for completion in completions]
