"""Results of tests, tasks and duels: metrics, rows that stages have returned, scores by group.

Groups with few questions have no separate line: among many of them the highest and lowest scores would be chance. They are
pooled and counted.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from fedlight.evaluation.bootstrap import bootstrap_interval
from fedlight.report.parts import Part, Section, Table, short, spread
from fedlight.report.sections.answers import scored_rows, tasks
from fedlight.runs.rows import objects
from fedlight.runs.run import Run, by_method
from fedlight.support.words import number

MANY_LINES = 12
LAST = ("score/", "group_mean/", "own/", "win_rate")
NOT_SHOWN = ("low/", "high/", "share/")
FEWEST = 10
"""Questions of a group that has a line of its own."""
FIRST = 10
"""Lines that are shown before the others are asked for."""

Scored = dict[str, list[tuple[str, float]]]
"""Group -> question and score, of all seeds."""


def section(runs: Sequence[Run]) -> Section | None:
    """Return a table of all tested metrics, one of scores after training, and one for each stage that returned rows."""
    parts: list[Part] = []
    by_group = tables_by_group(runs)
    # Scores by group are lines of a separate table instead of columns here.
    beside = tuple(f"score/{task}/" for task in by_group)
    tested = [run for run in runs if run.command in ("test", "validate")]
    fits = [run for run in runs if run.command == "fit"]
    parts += _metrics("Tests", tested, True, beside)
    parts += _metrics("Scores at the end of training", fits, False, beside)
    parts += by_group.values()
    parts += [table for method, of_method in by_method(runs).items() for table in _rows(method, of_method)]
    return Section("tasks", "Tests, tasks and duels", "", parts) if parts else None


def _metrics(title: str, runs: Sequence[Run], everything: bool, beside: tuple[str, ...]) -> list[Table]:
    values: dict[str, dict[str, list[Any]]] = {}
    for run in runs:
        for name, value in last_metrics(run).items():
            wanted = everything or name.startswith(LAST)
            if wanted and not name.startswith((*NOT_SHOWN, *beside)) and (score := number(value)) is not None:
                values.setdefault(run.method, {}).setdefault(name, []).append(score)
    if not values:
        return []
    names = {name: name.removeprefix("test/") for of_method in values.values() for name in of_method}
    seeds = max(len(scores) for of_method in values.values() for scores in of_method.values())
    return [_spreads(title, "run", names, values, seeds)._replace(folded=len(names) > MANY_LINES)]


def _spreads(
    title: str,
    first: str,
    columns: Mapping[str, str],
    values: Mapping[str, Mapping[str, list[Any]]],
    seeds: int,
) -> Table:
    """Return a line of means and standard deviations for each name in ``values``; ``columns``: key -> what it is called."""
    lines = [[label, *(spread(line.get(key, [])) for key in columns)] for label, line in values.items()]
    caption = f"Mean ± standard deviation over {seeds} seeds." if seeds > 1 else ""
    return Table(title, [first, *columns.values()], lines, caption)


def last_metrics(run: Run) -> dict[str, Any]:
    """Return the last metrics of a stage, or the last that a command's logger wrote."""
    metrics = run.done().get("metrics")
    if isinstance(metrics, dict):
        return metrics
    return {
        name: text
        for row in run.metrics()
        for name, text in row.items()
        if text and name not in ("epoch", "step")
    }


def _rows(method: str, runs: Sequence[Run]) -> list[Table]:
    """Return the rows of a stage's runs as tables; of several seeds, means and standard deviations."""
    called = [run for run in runs if run.command == "call"]
    rows = [row for run in called for row in objects(run.done().get("rows")) if row]
    if not rows:
        return []
    first = next(iter(rows[0]))  # "method", or whatever the rows are about
    columns = {key: key.replace("_", " ") for row in rows for key in row if key not in (first, "seed")}
    values: dict[str, dict[str, list[Any]]] = {}
    for row in rows:
        line = values.setdefault(str(row.get(first, "-")), {})
        for name in columns:
            if row.get(name) is not None:
                line.setdefault(name, []).append(row[name])
    seeds = len(called) if columns else 0
    return [_spreads(f"Stage {method}", first, columns, values, seeds)._replace(folded=True)]


def tables_by_group(runs: Sequence[Run]) -> dict[str, Table]:
    """Return a table for each task with several groups, by its name: a line for each group, the lowest mean first."""
    by_task: dict[str, dict[str, Scored]] = {}
    for run in runs:
        for task in tasks(run):
            of_run: Scored = {}
            for row, score in scored_rows(run, task):
                of_run.setdefault(str(row.get("group", "")), []).append((f"{row.get('row')}", score))
            if len(of_run) > 1:
                of_method = by_task.setdefault(task, {}).setdefault(run.method, {})
                for group, scored in of_run.items():
                    of_method.setdefault(group, []).extend(scored)
    return {task: _table(task, of_methods) for task, of_methods in by_task.items()}


def _table(task: str, of_methods: Mapping[str, Scored]) -> Table:
    questions: dict[str, set[str]] = {}
    for scored in of_methods.values():
        for group, pairs in scored.items():
            questions.setdefault(group, set()).update(question for question, _ in pairs)
    large = [group for group, asked in questions.items() if len(asked) >= FEWEST]
    small = [group for group in questions if group not in large]
    pooled = {
        method: {
            **{group: scored.get(group, []) for group in large},
            "": [(f"{group} {row}", score) for group in small for row, score in scored.get(group, [])],
        }
        for method, scored in of_methods.items()
    }

    def mean_of(group: str) -> float:
        means = [fmean(score for _, score in scored[group]) for scored in pooled.values() if scored[group]]
        return fmean(means) if means else math.inf  # groups without an answer come last

    def line(name: str, number: int, group: str) -> list[str]:
        return [name, f"{number:,}", *(_cell(scored[group]) for scored in pooled.values())]

    in_order = sorted(large, key=lambda group: (mean_of(group), group))
    lines = [line(group or "(none)", len(questions[group]), group) for group in in_order]
    if small:
        whole = sum(len(questions[group]) for group in small)
        lines.append(line(f"{len(small):,} with fewer than {FEWEST} questions", whole, ""))
    caption = "Mean score and its 95 % interval over questions, the lowest group first."
    return Table(f"{task} by group", ["group", "questions", *of_methods], lines, caption, first=FIRST)


def _cell(scored: Sequence[tuple[str, float]]) -> str:
    if not scored:
        return "-"
    values = [score for _, score in scored]
    low, high = bootstrap_interval(values, [question for question, _ in scored])
    return short(fmean(values)) + ("" if math.isnan(low) else f" [{low:.3f}, {high:.3f}]")
