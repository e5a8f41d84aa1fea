"""Agreement of judges with human votes, by category; a stage of recipes.

The judge sees every voted pair of answers in both orders. `fedlight.evaluation.agreement` has the measures.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedlight.datamodules.rows.columns import check_columns, text_at
from fedlight.datamodules.rows.rows import RowsError, load_rows, write_rows
from fedlight.datamodules.rows.votes import VOTE_NAMES, invert_choice_values
from fedlight.evaluation.agreement import Agreement, Judged, agreement
from fedlight.evaluation.judge import BothPositions
from fedlight.evaluation.win_rate import outcomes, win_tie_lose
from fedlight.judges.duels import known, made_judge
from fedlight.support.checks import refuse_below
from fedlight.support.files import csv_text, write_json, write_whole
from fedlight.support.results import rich_text
from fedlight.support.seeding import derive_seed

ALL, WITHOUT_CATEGORY = "all", "(none)"
FEWEST_PAIRS, MOST_CATEGORIES = 10, 10
"""Of a category that the report shows, and of how many it shows."""
SHARES = (
    *("majority", "vote", "people", "majority_decided", "vote_decided", "people_decided"),
    *("order_changed", "prefers_first", "unread"),
)
"""Columns of the table of results, over all pairs."""

PAIRS = {"pairs": "compared", "unread_pairs": "unread", "no_majority": "no majority"}
TIED = {"no_verdict": "judge ties", "no_vote": "people tie"}
VOTES = {"votes": "votes", "several": "by several"}
WITH_TIES = PAIRS | VOTES
WITHOUT = PAIRS | TIED | VOTES | {"ties": "tied votes"}
"""Counts of the report's second table: field of `Agreement` -> heading."""
WORTH = {"a": 1.0, "b": 0.0, "tie": 0.5}
NEEDED = ("response_a", "response_b", "choice", "client")


def judge_agreement(
    votes: str,
    judges: dict[str, dict[str, Any] | None],
    columns: dict[str, str],
    choice_values: dict[str, Any],
    output: str,
    question: str | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Compare judges with people on pairs of answers that people have voted on.

    Args:
        votes: rows, one for each vote.
        judges: name -> ``class_path`` and ``init_args`` of a judge; null: it is not asked.
        columns: columns of ``response_a``, ``response_b``, ``choice``, ``client`` (the voter) and, if there is one,
            ``category``; all others are slots that judges may read, such as ``prompt``.
        choice_values: ``a``, ``b`` and ``tie`` -> value, or list of values, of the choice.
        output: folder for ``agreement.csv``, ``verdicts.jsonl`` and ``counts.json``.
        question: column that identifies the question, over which intervals are bootstrapped; None: the slots' texts.
        limit: number of pairs to judge, at least 1, drawn from all; None: all.
        seed: seed of that draw and of the bootstrap.

    Returns:
        ``rows``, one for each judge, with its agreement with the majority and with single votes, with ties and without
        (``_decided``), the agreement of people with each other, its preference for positions, and the numbers of pairs,
        votes and left-out votes; a ``report`` by category, and ``counts`` of the rows.

    Raises:
        ValueError: there is no such judge, or none at all, ``limit`` is below 1, or a vote has a value that
            ``choice_values`` does not know.
    """
    refuse_below(1, limit=limit)
    made = {name: BothPositions(made_judge(spec)) for name, spec in judges.items() if spec}
    if not made:
        raise ValueError(f"judges={judges} names nobody: give class_path and init_args of a judge")
    pairs, counts = read_pairs(votes, columns, choice_values, question, limit, seed)
    fields = [pair.fields for pair in pairs]
    firsts, seconds = [pair.first for pair in pairs], [pair.second for pair in pairs]
    for judge in made.values():  # all limits before the first request
        judge.announce(fields, firsts, seconds)
    numbers = {"pairs": counts.pairs, "votes": counts.votes, "votes_left_out": counts.rows - counts.votes}
    rows, lines, records = [], [], []
    for name, judge in made.items():
        verdicts = judge.verdicts(fields, firsts, seconds)
        judge_lines = _by_category(pairs, verdicts, seed)
        lines += [{"judge": name, **line} for line in judge_lines]
        rows.append({"method": name, **{key: judge_lines[0][key] for key in SHARES}, **numbers})
        records += [
            _record(name, pair, first, second) for pair, first, second in zip(pairs, *verdicts, strict=True)
        ]
    write_rows(records, Path(output) / "verdicts.jsonl")
    write_whole(Path(output) / "agreement.csv", csv_text([known(line) for line in lines], [*lines[0]]))
    write_json(Path(output) / "counts.json", asdict(counts))
    return {
        "rows": [known(row) for row in rows],
        "report": f"{counts}\n{report(lines)}",
        "counts": asdict(counts),
    }


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
    `judge_agreement`; ``source`` has one row for each vote.

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


def report(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return two tables for each judge: shares of all pairs and of the largest categories, and the counts behind them."""
    tables = []
    for judge in dict.fromkeys(line["judge"] for line in lines):
        of_judge = [line for line in lines if line["judge"] == judge]
        shown = _largest(of_judge)
        tables += [_shares(judge, shown), _counted(judge, shown)]
        if len(shown) < len(of_judge):
            tables.append(f"{len(of_judge) - len(shown):,} more categories are in agreement.csv.")
    return "\n".join(tables)


def _largest(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    first, *others = lines  # the line of all pairs is the first
    enough = [line for line in others if line["shown"] >= FEWEST_PAIRS]
    return [first, *sorted(enough, key=lambda line: (-line["shown"], line["category"]))[:MOST_CATEGORIES]]


def _shares(judge: str, lines: Sequence[Mapping[str, Any]]) -> str:
    header = ["category", "order changed", "prefers first", "unread"]
    for setting in ("with ties", "without"):
        header += [f"{setting}: pairs", "majority", "95 % interval", "one vote", "two people"]
    cells = [
        [
            str(line["category"]),
            *(_share(line[name]) for name in ("order_changed", "prefers_first", "unread")),
            *(text for ending in ("", "_decided") for text in _setting(line, ending)),
        ]
        for line in lines
    ]
    return rich_text(f"{judge}, against people", header, cells)


def _counted(judge: str, lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of counts: in each setting, compared pairs and left-out ones, by reason, add up to all pairs."""
    header = ["category", "pairs shown"]
    for setting, names in (("with ties", WITH_TIES), ("without", WITHOUT)):
        first, *others = names.values()
        header += [f"{setting}: {first}", *others]
    cells = [
        [
            str(line["category"]),
            f"{line['shown']:,}",
            *(f"{line[name]:,}" for name in WITH_TIES),
            *(f"{line[f'{name}_decided']:,}" for name in WITHOUT),
        ]
        for line in lines
    ]
    return rich_text(f"{judge}: on how many pairs and votes", header, cells)


def _setting(line: Mapping[str, Any], ending: str) -> list[str]:
    at = {name: line[f"{name}{ending}"] for name in Agreement._fields}
    low, high = _share(at["majority_low"]), _share(at["majority_high"])
    shares = [_share(at[name]) for name in ("majority", "vote", "people")]
    return [str(at["pairs"]), shares[0], "-" if low == "-" else f"{low} to {high}", *shares[1:]]


def _share(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"


def _by_category(
    pairs: Sequence[Pair], verdicts: tuple[list[float], list[float]], seed: int
) -> list[dict[str, Any]]:
    """Return a line for all pairs, and one for each category; pairs without a category have a line if others have one."""
    both = outcomes(*verdicts)
    categories = sorted({pair.category for pair in pairs})
    lines = []
    for category in [None, *(categories if any(categories) else [])]:  # None: all pairs
        at = [index for index, pair in enumerate(pairs) if category in (None, pair.category)]
        judged = [Judged(pairs[index].votes, both[index], pairs[index].question) for index in at]
        first, second = ([order[index] for index in at] for order in verdicts)
        bias = win_tie_lose(first, second)
        decided = agreement(judged, ties=False, seed=seed)._asdict()
        lines.append(
            {
                "category": ALL if category is None else category or WITHOUT_CATEGORY,
                "shown": len(at),
                **agreement(judged, ties=True, seed=seed)._asdict(),
                **{f"{key}_decided": x for key, x in decided.items()},
                **{name: getattr(bias, name) for name in ("order_changed", "prefers_first")},
                "unread": bias.unread / len(at),
            }
        )
    return lines


def _record(judge: str, pair: Pair, first: float, second: float) -> dict[str, Any]:
    verdicts = {"ours_first": first, "ours_second": second}
    return {
        **{"judge": judge, "category": pair.category, "question": pair.question},
        **{"first": pair.first, "second": pair.second, "votes": pair.votes},
        **{name: None if math.isnan(verdict) else verdict for name, verdict in verdicts.items()},
    }
