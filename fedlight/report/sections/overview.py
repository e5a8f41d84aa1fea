"""Overview: the recipes' tables of results, and a line for each run that has trained."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from fedlight.report.figures.headline import draw_results, headline
from fedlight.report.figures.style import Looks
from fedlight.report.method_looks import method_looks, row_looks
from fedlight.report.parts import Chart, Part, Section, Table
from fedlight.report.tables import duration, short, slug, spread
from fedlight.runs import facts
from fedlight.runs.rows import number
from fedlight.runs.run import Run, read_recipe
from fedlight.support.results import chance_notes, in_brackets, mark, without_ends


def section(runs: Sequence[Run]) -> Section:
    """Return the results of recipes, then the runs."""
    parts: list[Part] = []
    notes: list[str] = []
    recipes, known = list(dict.fromkeys(run.home for run in runs)), method_looks(runs)
    for home in recipes:
        found = read_recipe(home)
        rows = found.results()
        notes += [f"{home.name}: {name} {what}" for name, what in found.faults.items()]
        if rows:
            notes += chance_notes(rows)
            title = "Results" if len(recipes) == 1 else f"Results of {home.name}"
            of_home = [run for run in runs if run.home == home]
            styles = row_looks([row["method"] for row in rows], of_home, known)
            parts += [*_pictures(rows, title, slug(home.name), styles), results_table(rows, title)]
    trained = [run for run in runs if run.command == "fit" or (not run.command and run.metrics())]
    if trained:
        parts.append(runs_table(trained, "What was trained"))
    if others := [run for run in runs if run not in trained]:
        parts.append(stages_table(others, folded=bool(trained)))
    return Section("overview", "Overview", _intro(runs, trained), parts, tuple(notes))


def _intro(runs: Sequence[Run], trained: Sequence[Run]) -> str:
    seeds = sorted({run.seed for run in runs if run.seed is not None})
    open_runs = [run.label for run in runs if not run.is_done and run.path("done.json") is None]
    words = [f"{len(trained)} training run{'s' if len(trained) != 1 else ''}"]
    if len(seeds) > 1:
        words.append(f"seeds {', '.join(map(str, seeds))}")
    elif seeds:
        words.append(f"seed {seeds[0]}")
    text = ", ".join(words) + "."
    if open_runs:
        named = "; ".join(open_runs[:5]) + (" and others" if len(open_runs) > 5 else "")
        text += f" No record of an end: {named}."
    return text


def results_table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """Return mean and standard deviation over seeds of each metric, a line per method.

    Examples:
        >>> results_table([{"method": "m", "x": 0.5}], "Results").lines
        [['m', '0.500']]
    """
    methods = dict.fromkeys(row["method"] for row in rows)
    metrics = without_ends(key for row in rows for key in _numbers(row))
    seeds = {str(row["seed"]) for row in rows if "seed" in row}
    lines = []
    for method in methods:
        own = [row for row in rows if row["method"] == method]
        cells = [
            spread([row[name] for row in own if name in _numbers(row)])
            + in_brackets(own, name)
            + mark(own, name)
            for name in metrics
        ]
        lines.append([method, *cells])
    caption = f"Mean ± standard deviation over {len(seeds)} seeds." if len(seeds) > 1 else ""
    if any("[" in cell for line in lines for cell in line[1:]):
        of = ", the mean of its ends over the seeds" if len(seeds) > 1 else ""
        caption += f" In brackets: the 95 % interval within a seed{of}."
    return Table(title, ["method", *(metric.replace("_", " ") for metric in metrics)], lines, caption)


def _numbers(row: Mapping[str, Any]) -> list[str]:
    """Return the names of a row's metrics."""
    return [key for key, value in row.items() if key not in ("method", "seed") and number(value) is not None]


def _pictures(rows: Sequence[dict[str, Any]], title: str, name: str, styles: Looks) -> list[Chart]:
    """Draw the most telling metrics of the table; nothing with a single method."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    chosen = headline(rows, without_ends(key for row in rows for key in _numbers(row)))
    return [draw_results(rows, methods, chosen, title, name, styles)] if len(methods) > 1 and chosen else []


def runs_table(runs: Sequence[Run], title: str) -> Table:
    """Return a line for each method: model, algorithm, rounds, time and state."""
    lines = []
    for method in dict.fromkeys(run.method for run in runs):
        of_method = [run for run in runs if run.method == method]
        lines.append([method, *_facts(of_method)])
    header = ["run", "algorithm", "model", "data", "clients a round", "rounds", "seeds", "time", "state"]
    caption = "Rounds are epochs where training is centralised."
    if len(lines) < len(runs):
        caption += " Time: mean over seeds."
    if any(run.is_continued for run in runs):
        caption += " Of a run that several commands trained, the time is that of the last one."
    return Table(title, header, lines, caption)


def _facts(runs: Sequence[Run]) -> list[str]:
    first = runs[0]
    done = [facts.rounds(run) for run in runs]
    counts = sorted({str(have) if want in (None, have) else f"{have} of {want}" for have, want in done})
    seeds = [str(run.seed) for run in runs if run.seed is not None]
    times = [seconds for run in runs if (seconds := _seconds(run)) is not None]
    ended = sum(run.is_done for run in runs)
    state = (
        "done" if ended == len(runs) else f"{ended} of {len(runs)} done" if len(runs) > 1 else _state(first)
    )
    return [
        facts.algorithm(first) or "-",
        facts.model(first) or "-",
        facts.data(first) or "-",
        short(facts.within(first.config(), "federated", "clients_per_round")),
        ", ".join(counts),
        ", ".join(seeds) or "-",
        duration(mean(times)) if times else "-",
        state,
    ]


def _state(run: Run) -> str:
    state = str(run.record().get("state", ""))
    return "under way or killed" if state == "running" else state or "no record of an end"


def _seconds(run: Run) -> float | None:
    return number(run.json("done.json").get("seconds")) or number(run.record().get("seconds"))


def stages_table(runs: Sequence[Run], folded: bool) -> Table:
    """Return a table of the runs without training: tests, predictions and calls."""
    lines = []
    for method in dict.fromkeys(run.method for run in runs):
        of_method = [run for run in runs if run.method == method]
        stage = str(of_method[0].settings().get("stage") or of_method[0].command or "-")
        command, _, target = stage.partition(" ")  # the name of the target is shown without its folders
        ended = sum(run.is_done for run in of_method)
        what = f"{command} {Path(target).name}".strip()
        lines.append([method, what, f"{ended} of {len(of_method)} done"])
    return Table("Other stages", ["stage", "what it did", "state"], lines, folded=folded)
