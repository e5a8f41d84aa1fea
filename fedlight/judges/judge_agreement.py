"""Agreement of judges with human votes, by category; a stage of recipes.

The judge sees every voted pair of answers in both orders. `fedlight.judges.voted_pairs` reads the rows and counts
those left out; `fedlight.evaluation.human_agreement` has the measures.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedlight.datamodules.rows.rows import write_rows
from fedlight.evaluation.human_agreement import Agreement, Judged, agreement
from fedlight.evaluation.judge import BothPositions
from fedlight.evaluation.win_rate import outcomes, win_tie_lose
from fedlight.judges.duels import known, made_judge
from fedlight.judges.voted_pairs import Pair, read_pairs
from fedlight.support.files import csv_text, write_json, write_whole
from fedlight.support.results import rich_text

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
        limit: number of pairs to judge, drawn from all; None: all.
        seed: seed of that draw and of the bootstrap.

    Returns:
        ``rows``, one for each judge, with its agreement with the majority and with single votes, with ties and without
        (``_decided``), the agreement of people with each other, its preference for positions, and the numbers of pairs,
        votes and left-out votes; a ``report`` by category, and ``counts`` of the rows.

    Raises:
        ValueError: there is no such judge, or none at all, or a vote has a value that ``choice_values`` does not know.
    """
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
    """Return the line of all pairs, then those of the largest categories that have enough pairs to say something."""
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
