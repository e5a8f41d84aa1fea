"""Rows without training that belong into every table of real votes: the longer answer wins, and how far voters agree.

People prefer longer answers, so a selector that does no better than "the longer answer wins" has learned nothing else.
Voters also contradict each other: the majority of the *other* voters on the same comparison is the best answer of a model
that knows everybody but the voter. It estimates a ceiling for models without tastes and is no bound: the majority of few
voters errs itself, and a model of the voter's own taste may exceed it.
"""

from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np

from fedlight.datamodules.rows.votes import Votes

LEAST_VOTERS = 3


LENGTHS: Mapping[str, Callable[[str], int]] = {"characters": len, "words": lambda text: len(text.split())}


def longer_wins(votes: Votes, length: Callable[[str], int]) -> np.ndarray:
    """Return how right "the longer answer wins" is on each vote, ``(votes,)``: 1, 0, or 0.5 for equal lengths.

    Examples:
        >>> from fedlight.datamodules.text.encoding import Comparison
        >>> votes = Votes([Comparison({}, "long", "no"), Comparison({}, "x", "y")], comparison=[0, 0, 1], winner=[0, 1, 0])
        >>> longer_wins(votes, len).tolist()
        [1.0, 0.0, 0.5]
    """
    differences = [length(pair.second) - length(pair.first) for pair in votes.comparisons]
    verdicts = np.sign(np.array(differences))[votes.comparison]  # [votes], 1: the second is longer
    return (1 + verdicts * (2 * np.array(votes.winner) - 1)) / 2


def majority_of_others(votes: Votes, least_voters: int = LEAST_VOTERS) -> np.ndarray:
    """Return whether each vote is that of the majority of the other voters on its comparison, ``(votes,)``.

    1 where it is, 0 where it is not, 0.5 where the others are tied, and NaN on comparisons with fewer voters than
    ``least_voters``, the voter included. A voter with both choices on a comparison has no say in it.

    Raises:
        ValueError: the votes have no voters.

    Examples:
        >>> votes = Votes(comparison=[0, 0, 0, 1, 1], winner=[1, 1, 0, 1, 1], clients=["u", "v", "w", "u", "v"])
        >>> majority_of_others(votes).tolist()
        [0.5, 0.5, 0.0, nan, nan]
    """
    if not votes.clients:
        raise ValueError("the majority of the other voters needs a column of voters: set columns.client")
    sums: Counter[tuple[int, str]] = Counter()
    for comparison, winner, voter in zip(votes.comparison, votes.winner, votes.clients, strict=True):
        sums[comparison, voter] += 2 * winner - 1  # both choices of a voter cancel
    totals: Counter[int] = Counter()
    voters: Counter[int] = Counter()
    for (comparison, _), votes_of_voter in sums.items():
        totals[comparison] += votes_of_voter
        voters[comparison] += 1
    # The total less the voter's own votes has the sign of the others' majority.
    accuracies = [
        (1 + np.sign(totals[comparison] - sums[comparison, voter]) * (2 * winner - 1)) / 2
        if voters[comparison] >= least_voters
        else np.nan
        for comparison, winner, voter in zip(votes.comparison, votes.winner, votes.clients, strict=True)
    ]
    return np.array(accuracies)


def describe(votes: Votes) -> str:
    """Return in one line how the rows without training do on votes, beside which a selector's accuracy is to be read.

    Examples:
        >>> from fedlight.datamodules.text.encoding import Comparison
        >>> pairs = [Comparison({}, "long", "no"), Comparison({}, "x", "y z")]
        >>> print(describe(Votes(pairs, comparison=[0, 0, 0, 1], winner=[0, 0, 1, 1], clients=["u", "v", "w", "u"])))
        without training: the longer answer wins 0.750 (by words 0.625); majority of the other voters 0.333, on 3 of 4 votes
        >>> describe(Votes(pairs, comparison=[0], winner=[1])).endswith("the other voters unknown, on 0 of 1 votes")
        True
    """
    longer, words = (float(longer_wins(votes, length).mean()) for length in LENGTHS.values())
    agree = majority_of_others(votes) if votes.clients else np.full(len(votes.winner), np.nan)
    judged = agree[~np.isnan(agree)]  # NaN: too few voters
    share = f"{judged.mean():.3f}" if len(judged) else "unknown"
    return (
        f"without training: the longer answer wins {longer:.3f} (by words {words:.3f}); majority of the other voters "
        f"{share}, on {len(judged):,} of {len(agree):,} votes"
    )
