"""Results of tests, tasks and duels: metrics of evaluating commands, and rows that stages have returned."""

from collections.abc import Sequence
from typing import Any

from fedlight.report.parts import Part, Section, Table
from fedlight.report.sections.outcomes.by_group import judges_by_category, tables_by_group
from fedlight.report.tables import spread
from fedlight.runs.rows import number, objects
from fedlight.runs.run import Run

MANY_LINES = 12
LAST = ("score/", "group_mean/", "own/", "win_rate")
NOT_SHOWN = ("low/", "high/", "share/")


def section(runs: Sequence[Run]) -> Section | None:
    """Return a table of all tested metrics, one of scores after training, and one for each stage that returned rows."""
    parts: list[Part] = []
    by_group = tables_by_group(runs)
    # Scores by group have lines of a table of their own instead of columns here.
    beside = tuple(f"score/{task}/" for task in by_group)
    tested = [run for run in runs if run.command in ("test", "validate")]
    fits = [run for run in runs if run.command == "fit"]
    parts += _metrics("Tests", tested, True, beside)
    parts += _metrics("Scores at the end of training", fits, False, beside)
    parts += by_group.values()
    parts += judges_by_category(runs)
    parts += [table for method in dict.fromkeys(run.method for run in runs) for table in _rows(method, runs)]
    return Section("tasks", "Tests, tasks and duels", "", parts) if parts else None


def _metrics(title: str, runs: Sequence[Run], everything: bool, beside: tuple[str, ...]) -> list[Table]:
    values: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        for name, value in last_metrics(run).items():
            wanted = everything or name.startswith(LAST)
            if wanted and not name.startswith((*NOT_SHOWN, *beside)) and (found := number(value)) is not None:
                values.setdefault(run.method, {}).setdefault(name, []).append(found)
    if not values:
        return []
    names = list(dict.fromkeys(name for of_method in values.values() for name in of_method))
    lines = [[method, *(spread(own.get(name, [])) for name in names)] for method, own in values.items()]
    header = ["run", *(name.removeprefix("test/") for name in names)]
    return [Table(title, header, lines, _caption(values), folded=len(names) > MANY_LINES)]


def last_metrics(run: Run) -> dict[str, Any]:
    """Return the last metrics of a stage, or the last that a command's logger wrote."""
    found = run.done().get("metrics")
    if isinstance(found, dict):
        return found
    return {
        name: text
        for row in run.metrics()
        for name, text in row.items()
        if text and name not in ("epoch", "step")
    }


def _rows(method: str, runs: Sequence[Run]) -> list[Table]:
    """Return the rows of a stage as tables; of several seeds, means and standard deviations."""
    own = [run for run in runs if run.method == method and run.command == "call"]
    rows = [row for run in own for row in objects(run.done().get("rows")) if row]
    if not rows:
        return []
    first = next(iter(rows[0]))  # "method", or whatever the rows are about
    columns = list(dict.fromkeys(key for row in rows for key in row if key not in (first, "seed")))
    grouped: dict[str, dict[str, list[Any]]] = {}
    for row in rows:
        line = grouped.setdefault(str(row.get(first, "-")), {})
        for name in columns:
            if row.get(name) is not None:
                line.setdefault(name, []).append(row[name])
    lines = [[label, *(spread(line.get(name, [])) for name in columns)] for label, line in grouped.items()]
    header = [first, *(name.replace("_", " ") for name in columns)]
    several = {name: dict.fromkeys(columns, own) for name in grouped}
    return [Table(f"Stage {method}", header, lines, _caption(several), folded=True)]


def _caption(values: dict[str, dict[str, Any]]) -> str:
    most = max(len(found) for of_method in values.values() for found in of_method.values())
    return f"Mean ± standard deviation over {most} seeds." if most > 1 else ""
