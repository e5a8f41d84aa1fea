"""Pairs of answers with the votes of several people, read from rows with one vote each, and counts of all rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fedlight.datamodules.rows.columns import check_columns, text_at
from fedlight.datamodules.rows.rows import RowsError, load_rows
from fedlight.datamodules.rows.votes import VOTE_NAMES, invert_choice_values
from fedlight.support.seeding import derive_seed

WORTH = {"a": 1.0, "b": 0.0, "tie": 0.5}
NEEDED = ("response_a", "response_b", "choice", "client")


class Pair(NamedTuple):
    """Two answers to a prompt with people's votes on them: 1 for the first, 0 for the second, 0.5 for a tie."""

    fields: dict[str, str]
    first: str
    second: str
    category: str
    question: str
    votes: list[float]


@dataclass
class VoteCounts:
    """Counts of the rows; ``str`` gives them in words.

    Every row is a vote that counts, or is left out for one reason:
    ``rows == votes + identical + second_votes + not_drawn``. Every row is the first one of its pair, or not:
    ``rows == pairs + pairs_not_drawn + repeated + identical``.
    """

    source: str  # source of the rows
    rows: int = 0  # rows read, one vote each
    votes: int = 0  # votes that judges are compared with
    pairs: int = 0  # different pairs of answers that have these votes
    repeated: int = 0  # rows with the pair of an earlier row, most of them of another person
    identical: int = 0  # votes on two equal answers, which may be empty: there is nothing to compare
    # further votes of a person on a pair; the first counts, because agreement is between different people
    second_votes: int = 0
    changed: int = 0  # those of ``second_votes`` that differ from the first
    not_drawn: int = 0  # votes on pairs beyond ``limit``
    pairs_not_drawn: int = 0  # number of pairs beyond ``limit``
    on_empty: int = 0  # those of ``votes`` on a pair with one empty answer, which is judged like any other
    unnamed: int = 0  # those of ``votes`` without a person's name; each counts as another person's

    def __str__(self) -> str:
        return "\n".join(
            (
                f"{self.source}: {self.rows:,} rows, {self.repeated:,} of which repeat the pair of an earlier one",
                f"judged: {self.pairs:,} pairs with {self.votes:,} votes; "
                f"{self.on_empty:,} of these votes are on a pair with an empty answer, {self.unnamed:,} name nobody",
                f"left out: {self.identical:,} votes on two identical answers; "
                f"{self.second_votes:,} second votes of a person on a pair ({self.changed:,} differ from the first); "
                f"{self.not_drawn:,} votes on {self.pairs_not_drawn:,} pairs beyond the limit",
            )
        )


Voted = tuple[Pair, dict[str | int, float]]
"""Pair while rows are read, with its votes by person; a vote without a name has the number of its row."""


def read_pairs(
    source: str,
    columns: Mapping[str, str],
    choice_values: Mapping[str, Any],
    question: str | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> tuple[list[Pair], VoteCounts]:
    """Return each pair of answers once, whatever its order in a row, with its votes; and the counts.

    The same answers to another prompt, or under another question or category, are another pair. Arguments as
    `fedlight.judges.judge_agreement.judge_agreement`; ``source`` has one row for each vote.

    Raises:
        ValueError: a column is missing, a choice has an unknown value, a value means two things, or no row has two
            different answers.
    """
    if missing := [name for name in NEEDED if name not in columns]:
        raise RowsError(f"{source}: columns has no {missing[0]!r}; it needs {', '.join(NEEDED)}")
    rows = load_rows(source)
    check_columns(rows, {**columns, **({"question": question} if question else {})}, source)
    worth = {value: WORTH[name] for value, name in invert_choice_values(choice_values).items()}
    counts = VoteCounts(source, rows=len(rows))
    voted: dict[tuple[str, ...], Voted] = {}
    for number, row in enumerate(rows):
        at = {name: text_at(row, path) for name, path in columns.items()}
        if at["choice"] not in worth:
            raise RowsError(
                f"{source}, row {number + 1}: the choice {at['choice']!r} is none of choice_values ({', '.join(worth)})"
            )
        shown = _pair(at, text_at(row, question) if question else None)
        if shown.first == shown.second:
            counts.identical += 1  # nothing to compare
            continue
        answers = sorted((shown.first, shown.second))  # one pair in either order
        key = (shown.category, shown.question, *shown.fields.values(), *answers)
        counts.repeated += key in voted
        pair, votes = voted.setdefault(key, (shown, {}))
        # In the order that the pair's first row has.
        vote = worth[at["choice"]] if shown.first == pair.first else 1 - worth[at["choice"]]
        person = at["client"] or number  # a vote without a name is another person's
        if person in votes:
            counts.second_votes += 1
            counts.changed += vote != votes[person]
        else:
            votes[person] = vote
    if not voted:
        raise RowsError(f"{source}: no row has two different answers")
    return _drawn(list(voted.values()), limit, seed, counts)


def _pair(at: Mapping[str, str], question: str | None) -> Pair:
    slots = {name: text for name, text in at.items() if name not in VOTE_NAMES}
    asked = "\n".join(slots.values()) if question is None else question
    return Pair(slots, at["response_a"], at["response_b"], at.get("category", ""), asked, [])


def _drawn(
    voted: list[Voted], limit: int | None, seed: int, counts: VoteCounts
) -> tuple[list[Pair], VoteCounts]:
    """Return the pairs to be judged, in the order of the rows, with their votes; and the completed ``counts``."""
    kept = set(range(len(voted)))
    if limit is not None and limit < len(voted):
        order = np.random.default_rng(derive_seed(seed, "judged pairs")).permutation(len(voted))
        kept = set(order[:limit].tolist())  # the pairs keep the order of their rows
    pairs = []
    for index, (pair, votes) in enumerate(voted):
        if index not in kept:
            counts.not_drawn += len(votes)
            continue
        pairs.append(pair._replace(votes=list(votes.values())))
        counts.on_empty += len(votes) * (not pair.first or not pair.second)
        counts.unnamed += sum(isinstance(person, int) for person in votes)  # the number of a row
    counts.pairs, counts.pairs_not_drawn = len(pairs), len(voted) - len(pairs)
    counts.votes = sum(len(pair.votes) for pair in pairs)
    return pairs, counts
