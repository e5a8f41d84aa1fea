"""Scores by group of questions, such as the subjects of a benchmark, and of judges by category of the voted pairs.

Groups with few questions have no line of their own: among many of them the highest and lowest scores would be chance. They
are pooled and counted.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from fedlight.evaluation.bootstrap import bootstrap_interval
from fedlight.judges.task_answers import last_moment
from fedlight.report.parts import Table
from fedlight.report.sections.answers import tasks
from fedlight.report.tables import short
from fedlight.runs.rows import number
from fedlight.runs.run import Run

FEWEST = 10
"""Questions of a group that has a line of its own."""
FIRST = 10
"""Lines that are shown before the others are asked for."""
ALL = "all"

Scored = dict[str, list[tuple[str, float]]]
"""Group -> question and score, of all seeds."""


def tables_by_group(runs: Sequence[Run]) -> dict[str, Table]:
    """Return a table for each task with several groups, by its name: a line for each group, the lowest mean first."""
    found: dict[str, dict[str, Scored]] = {}
    for run in runs:
        for task in tasks(run):
            of_run = _scored(run, task)
            if len(of_run) > 1:
                of_method = found.setdefault(task, {}).setdefault(run.method, {})
                for group, own in of_run.items():
                    of_method.setdefault(group, []).extend(own)
    return {task: _table(task, of_methods) for task, of_methods in found.items()}


def _scored(run: Run, task: str) -> Scored:
    rows = run.jsonl(f"tasks/{last_moment(run.folder / 'tasks', task)}/{task}.jsonl")
    found: Scored = {}
    for row in rows:
        if (score := number(row.get("score"))) is not None:
            found.setdefault(str(row.get("group", "")), []).append((f"{row.get('row')}", score))
    return found


def _table(task: str, of_methods: Mapping[str, Scored]) -> Table:
    questions: dict[str, set[str]] = {}
    for scored in of_methods.values():
        for group, own in scored.items():
            questions.setdefault(group, set()).update(question for question, _ in own)
    large = [group for group, own in questions.items() if len(own) >= FEWEST]
    small = [group for group in questions if group not in large]
    pooled = {
        method: {
            **{group: scored.get(group, []) for group in large},
            "": [(f"{group} {one}", score) for group in small for one, score in scored.get(group, [])],
        }
        for method, scored in of_methods.items()
    }

    def mean_of(group: str) -> float:
        means = [fmean(score for _, score in own[group]) for own in pooled.values() if own[group]]
        return fmean(means) if means else math.inf

    lines = [
        [group or "(none)", f"{len(questions[group]):,}", *(_cell(own[group]) for own in pooled.values())]
        for group in sorted(large, key=lambda group: (mean_of(group), group))
    ]
    if small:
        whole = sum(len(questions[group]) for group in small)
        name = f"{len(small):,} with fewer than {FEWEST} questions"
        lines.append([name, f"{whole:,}", *(_cell(own[""]) for own in pooled.values())])
    caption = "Mean score and its 95 % interval over questions, the lowest group first."
    return Table(f"{task} by group", ["group", "questions", *of_methods], lines, caption, first=FIRST)


def _cell(scored: Sequence[tuple[str, float]]) -> str:
    if not scored:
        return "-"
    values = [score for _, score in scored]
    return short(fmean(values)) + _ends(*bootstrap_interval(values, [question for question, _ in scored]))


def _ends(low: float, high: float) -> str:
    return "" if math.isnan(low) else f" [{low:.3f}, {high:.3f}]"


def judges_by_category(runs: Sequence[Run]) -> list[Table]:
    """Return how often judges agree with the majority of people, for each stage of `judge_agreement` with categories."""
    found = []
    for run in runs:
        rows = run.csv("agreement.csv")
        judges = list(dict.fromkeys(row.get("judge", "") for row in rows))
        by_category: dict[str, dict[str, Any]] = {}
        for row in rows:
            by_category.setdefault(row.get("category", ""), {})[row.get("judge", "")] = row
        pairs = {
            category: max(number(row.get("pairs_decided")) or 0.0 for row in own.values())
            for category, own in by_category.items()
        }
        shown = [category for category in by_category if category != ALL and pairs[category] >= FEWEST]
        if not shown:
            continue
        lines = [
            [
                category,
                f"{pairs[category]:,.0f}",
                *(_agreement(by_category[category].get(judge, {})) for judge in judges),
            ]
            for category in sorted(shown, key=lambda category: (-pairs[category], category))
        ]
        left = len(by_category) - len(shown) - (ALL in by_category)
        caption = "Share of pairs with a majority on which the judge agrees with it, ties left out, and the 95 % interval."
        if left:
            which = "category" if left == 1 else "categories"
            caption += f" {left:,} {which} with fewer than {FEWEST} pairs left out: see agreement.csv."
        title = f"{run.method}: judges and people by category"
        found.append(Table(title, ["category", "most pairs", *judges], lines, caption, first=FIRST))
    return found


def _agreement(row: Mapping[str, Any]) -> str:
    share, low, high = (number(row.get(f"majority{end}_decided")) for end in ("", "_low", "_high"))
    return "-" if share is None else short(share) + ("" if low is None or high is None else _ends(low, high))
