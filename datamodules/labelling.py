"""From several completions per prompt to labelled preference pairs: who is compared, who votes, who wins.

Section 4 of Wu et al., "Towards Federated RLHF with Aggregated Client Preference for LLMs", ICLR 2025,
https://arxiv.org/abs/2407.03038: all n (n - 1) / 2 pairs of a prompt's n completions are compared by every
selector, and the majority of the selectors labels the pair. Deviation, on by default: a selector's
log-probabilities of both orders are averaged (``orders="both"``), so that a taste for the first position
cancels. Every labelled pair is kept, whichever side won.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

import numpy as np

from fedlight.datamodules.rows import Rows, RowsError
from fedlight.datamodules.votes import Comparison

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
    """One selector's log-probabilities of the two answers of each pair, whatever order they were shown in.

    Args:
        predictions: rows with ``index`` (of the pair), ``order`` (0: the first answer is shown as A; 1: as B),
            ``logp_a`` and ``logp_b``.
        num_pairs: number of pairs.
        orders: ``"both"`` takes the mean over the two orders, ``"one"`` looks at order 0 alone.

    Returns:
        ``(num_pairs, 2)``: log-probabilities that the first, the second answer is better; NaN where a pair was not
        read in every order that counts.

    Example:
        >>> as_a = {"index": 0, "order": 0, "logp_a": -1.0, "logp_b": -2.0}
        >>> as_b = {"index": 0, "order": 1, "logp_a": -3.0, "logp_b": -0.5}
        >>> gather([as_a, as_b], num_pairs=2).tolist()
        [[-0.75, -2.5], [nan, nan]]
    """
    by_order = np.full((num_pairs, 2, 2), np.nan)
    for row in predictions:
        answers = (row["logp_a"], row["logp_b"])
        by_order[row["index"], row["order"]] = answers if row["order"] == 0 else answers[::-1]
    return by_order[:, 0] if orders == "one" else by_order.mean(axis=1)


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


def label(pairs: Sequence[Comparison], log_probs: np.ndarray) -> tuple[list[dict[str, Any]], LabelCounts]:
    """Preference rows from pairs and what the selectors say of them.

    Args:
        pairs: from `form_pairs`.
        log_probs: `gather` of each selector, stacked: ``(selectors, pairs, 2)``.

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
