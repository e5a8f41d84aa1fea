"""Decided votes on comparisons, read from rows; ties, missing values and repetitions are counted."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedlight.datamodules.rows.columns import REPLIES, Columns, check_columns, field_at, text_at
from fedlight.datamodules.rows.rows import RowsError
from fedlight.datamodules.text.encoding import Comparison
from fedlight.support.types import Rows

ChoiceValues = Mapping[str, Any]
VOTE_NAMES = (*REPLIES, "choice", "score_a", "score_b", "client", "category", "group")
"""Names of a column map that are no slots of the template."""


@dataclass
class VoteCounts:
    """Counts of a source's rows, votes and rows left out; ``str`` gives a summary in one line.

    Examples:
        >>> print(VoteCounts("v", rows=5, ties=1, missing=1, votes=3, comparisons=2))
        v: 5 rows, 3 votes on 2 comparisons; left out: 1 ties, 1 missing, 0 identical, 0 duplicates; 0 conflicts kept
    """

    source: str
    rows: int = 0
    ties: int = 0
    missing: int = 0
    identical: int = 0
    duplicates: int = 0
    conflicts: int = 0
    votes: int = 0
    comparisons: int = 0

    def __str__(self) -> str:
        return (
            f"{self.source}: {self.rows:,} rows, {self.votes:,} votes on {self.comparisons:,} comparisons; left out: "
            f"{self.ties:,} ties, {self.missing:,} missing, {self.identical:,} identical, {self.duplicates:,} duplicates; "
            f"{self.conflicts:,} conflicts kept"
        )


@dataclass
class Votes:
    """Decided votes, in the order of the rows."""

    comparisons: list[Comparison] = field(default_factory=list)  # compared answers, each pair once
    comparison: list[int] = field(default_factory=list)  # index into ``comparisons`` of each vote
    # 0 for each vote if the first answer won, 1 if the second
    winner: list[int] = field(default_factory=list)
    clients: list[str] = field(default_factory=list)  # client of each vote; empty without a column for it
    # category of each vote; empty without a column for it
    categories: list[str] = field(default_factory=list)
    # client -> its known group; empty without a column for it. No model sees it
    groups: dict[str, str] = field(default_factory=dict)
    counts: VoteCounts = field(default_factory=lambda: VoteCounts(""))

    def take(self, chosen: np.ndarray) -> "Votes":
        """Return the votes of these indices, ``(chosen,)``, and the comparisons that they are on, without counts of rows.

        Examples:
            >>> three = [Comparison({}, "a", "b"), Comparison({}, "c", "d"), Comparison({}, "e", "f")]
            >>> votes = Votes(three, comparison=[0, 2, 2], winner=[0, 1, 0], clients=["u", "v", "w"])
            >>> some = votes.take(np.array([2]))
            >>> some.comparisons[0].first, some.comparison, some.winner, some.clients
            ('e', [0], [0], ['w'])
        """
        kept, comparison = np.unique(np.array(self.comparison)[chosen], return_inverse=True)

        def of(values: Sequence[Any]) -> list[Any]:
            return [values[vote] for vote in chosen] if values else []

        return Votes(
            [self.comparisons[index] for index in kept],
            comparison.tolist(),
            of(self.winner),
            of(self.clients),
            of(self.categories),
            self.groups,
            VoteCounts(self.counts.source, votes=len(chosen), comparisons=len(kept)),
        )

    def number_prompts(self) -> np.ndarray:
        """Return the prompt number of each vote, ``(votes,)``: equal where all slots are equal."""
        numbers: dict[tuple, int] = {}
        per_comparison = [
            numbers.setdefault(tuple(sorted(comparison.fields.items())), len(numbers))
            for comparison in self.comparisons
        ]
        return np.array(per_comparison, dtype=np.int64)[self.comparison]  # [votes]


def read_votes(
    rows: Rows, columns: Columns, choice_values: ChoiceValues, required: Sequence[str], source: str
) -> Votes:
    """Read votes from rows; ties, missing values, identical answers and repeated votes are left out and counted.

    An answer that is a turn of a conversation, but the user's, is missing.

    A repeated vote is the same client's same choice between the same two answers to the same prompt, in either order;
    without a ``client`` column all rows are one client's. A client's opposite votes on one comparison are kept and counted
    as a conflict. The slots ``required`` may not be empty; ``choice_values`` has the raw value, or a list of them, of ``a``,
    ``b`` and ``tie``.

    Raises:
        RowsError: a mapped column does not exist, a choice has an unknown value, the choices contradict the scores, a
            client has two groups, or no vote is left.
    """
    _check_map(columns, source)
    check_columns(rows, columns, source)
    meaning = invert_choice_values(choice_values)
    _check_scores(rows, columns, meaning, source)
    votes = Votes(counts=VoteCounts(source, rows=len(rows)))
    if {"client", "group"} <= set(columns):
        pairs = ((text_at(row, columns["client"]), text_at(row, columns["group"])) for row in rows)
        votes.groups = map_groups(pairs, source)
    counts = votes.counts
    index: dict[tuple, int] = {}
    seen: set[tuple[str, int, int]] = set()
    for number, row in enumerate(rows, 1):
        values = {name: field_at(row, path, name) for name, path in columns.items()}
        a, b, choice = _read_answers(values, meaning, number, source)
        client, category = values.get("client", ""), values.get("category", "")
        needed = [values[name] for name in (*required, "client", "category") if name in values]
        if not (a and b and choice and all(needed)):
            counts.missing += 1
        elif choice == "tie":
            counts.ties += 1
        elif a == b:
            counts.identical += 1
        else:
            fields = {name: value for name, value in values.items() if name not in VOTE_NAMES}
            comparison, swapped = _find_comparison(votes, fields, a, b, index)
            winner = int(choice == "b") ^ swapped  # in the order of the comparison, not of the row
            if (client, comparison, winner) in seen:
                counts.duplicates += 1
                continue
            counts.conflicts += (client, comparison, 1 - winner) in seen  # both votes are kept
            seen.add((client, comparison, winner))
            votes.comparison.append(comparison)
            votes.winner.append(winner)
            votes.clients += [client] * ("client" in columns)
            votes.categories += [category] * ("category" in columns)
    counts.votes, counts.comparisons = len(votes.winner), len(votes.comparisons)
    if not votes.winner:
        raise RowsError(f"{counts}. No vote is left: check the column map and choice_values.")
    return votes


def _read_answers(
    values: Mapping[str, str], meaning: Mapping[str, str], number: int, source: str
) -> tuple[str, str, str]:
    """Return answer A, answer B and ``"a"``, ``"b"``, ``"tie"`` or ``""`` (missing)."""
    if "chosen" in values:
        return values["chosen"], values["rejected"], "a"
    raw = values["choice"]
    if raw and raw not in meaning:
        raise RowsError(
            f"{source}, row {number}: the choice {raw!r} is none of choice_values ({', '.join(meaning)}). "
            "Set choice_values.a, .b and .tie to the values of the data."
        )
    return values["response_a"], values["response_b"], meaning.get(raw, "")


def _find_comparison(
    votes: Votes, fields: Mapping[str, str], a: str, b: str, index: dict[tuple, int]
) -> tuple[int, int]:
    """Return the index of the comparison and whether this row has the answers in the other order; add a new one."""
    first, second = min(a, b), max(a, b)  # a row in the other order has the same key
    key = (tuple(sorted(fields.items())), first, second)
    if key not in index:
        index[key] = len(votes.comparisons)
        votes.comparisons.append(Comparison(fields, a, b))
    known = index[key]
    return known, int(votes.comparisons[known].first != a)


def _check_map(columns: Columns, source: str) -> None:
    needed = ("chosen", "rejected") if "chosen" in columns else ("response_a", "response_b", "choice")
    if missing := [name for name in needed if name not in columns]:
        raise RowsError(
            f"{source}: the column map has no {missing[0]!r}. It needs response_a, response_b and choice, or chosen and "
            "rejected."
        )
    if ("score_a" in columns) != ("score_b" in columns):
        raise RowsError(f"{source}: map both score_a and score_b, or none of them.")


def map_groups(pairs: Iterable[tuple[str, str]], source: str) -> dict[str, str]:
    """Return client -> group from pairs of the two, without pairs with an empty one; RowsError for two groups of one."""
    groups: dict[str, str] = {}
    for client, group in pairs:
        if client and group and groups.setdefault(client, group) != group:
            raise RowsError(
                f"{source}: the client {client!r} has two groups, {groups[client]!r} and {group!r}. Map columns.group to "
                "a column with one value per client, or leave it out."
            )
    return groups


def invert_choice_values(choice_values: ChoiceValues) -> dict[str, str]:
    """Return raw value as text -> a, b or tie; raise ValueError for another name, and for a value with two meanings."""
    meaning: dict[str, str] = {}
    for name, raw in choice_values.items():
        if name not in ("a", "b", "tie"):
            raise ValueError(
                f"choice_values has the key {name!r}; it takes a, b and tie, each with its raw value."
            )
        for value in raw if isinstance(raw, list | tuple) else [raw]:
            if str(value) in meaning:
                raise ValueError(
                    f"choice_values gives {value!r} two meanings, {meaning[str(value)]} and {name}."
                )
            meaning[str(value)] = name
    return meaning


def _check_scores(rows: Rows, columns: Columns, meaning: Mapping[str, str], source: str) -> None:
    """Raise RowsError where an answer with a lower score won; SHP's ``labels`` is 1 where *A* has the higher score."""
    if "score_a" not in columns:
        return
    against, decided = 0, 0
    for row in rows:
        margin = _parse_number(text_at(row, columns["score_a"])) - _parse_number(
            text_at(row, columns["score_b"])
        )
        choice = "a" if "chosen" in columns else meaning.get(text_at(row, columns["choice"]))
        if np.isfinite(margin) and margin != 0 and choice in ("a", "b"):  # NaN: a score is missing
            decided += 1
            against += (margin > 0) != (choice == "a")
    if against:
        values = {name: [raw for raw, named in meaning.items() if named == name] for name in ("a", "b")}
        raise RowsError(
            f"{source}: in {against:,} of {decided:,} rows the choice contradicts the scores. If the choice is read the "
            f"wrong way round, set choice_values.a: {values['b']} and choice_values.b: {values['a']}; if the scores mean "
            "something else, leave score_a and score_b out of the column map."
        )


def _parse_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")
