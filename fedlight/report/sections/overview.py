"""Overview: the recipes' tables of results, and a line for each run that has trained; at the end of the page the configs."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from fedlight.report.figures.style import HALF_A_PAGE, STYLE, Looks, method_looks, new_grid, row_looks
from fedlight.report.parts import (
    Chart,
    Code,
    Part,
    Section,
    Table,
    deviation,
    short,
    shortened,
    slug,
    spread,
    table_of,
)
from fedlight.runs import facts
from fedlight.runs.run import Run, by_method, read_recipe
from fedlight.support.files import read_text
from fedlight.support.results import chance_notes, in_brackets, mark, without_ends
from fedlight.support.words import in_largest_unit, number

PANELS = 4
MOST_METHODS = 24
SCORE = re.compile(r"win_rate|(^|_)(score|wins?)(_|$)")
LONGEST = 20  # characters of a name in the narrow figure, half as many as in the wide one
NARROW = 4.3  # inches: as wide as a phone, where the texts keep their size

Rows = Sequence[Mapping[str, Any]]
Values = dict[str, dict[str, list[float]]]  # metric -> method -> a value for each seed
SAME_IN_ALL = "the same in all"
MOST_COMPARED = 12
LONGEST_VALUE = 60  # characters of a value in the table
PACKAGES = ("fedlight", "python", "torch", "lightning", "transformers", "peft")


def section(runs: Sequence[Run]) -> Section:
    """Return the results of recipes, then the runs."""
    parts: list[Part] = []
    notes: list[str] = []
    homes, known = list(dict.fromkeys(run.home for run in runs)), method_looks(runs)
    for home in homes:
        recipe = read_recipe(home)
        rows = recipe.results()
        notes += [f"{home.name}: {name} {what}" for name, what in recipe.faults.items()]
        if not rows:
            continue
        notes += chance_notes(rows)
        title = "Results" if len(homes) == 1 else f"Results of {home.name}"
        methods = list(dict.fromkeys(row["method"] for row in rows))
        styles = row_looks(methods, [run for run in runs if run.home == home], known)
        chosen = headline(without_ends(key for row in rows for key in _numbers(row)))
        if len(methods) > 1 and chosen:
            parts.append(draw_results(rows, methods, chosen, title, slug(home.name), styles))
        parts.append(results_table(rows, title))
    trained = [run for run in runs if run.has_trained]
    if trained:
        parts.append(runs_table(trained))
    if others := [run for run in runs if run not in trained]:
        parts.append(stages_table(others, folded=bool(trained)))
    return Section("overview", "Overview", _intro(runs, trained), parts, tuple(notes))


def _intro(runs: Sequence[Run], trained: Sequence[Run]) -> str:
    seeds = sorted({run.seed for run in runs if run.seed is not None})
    open_runs = [run.label for run in runs if not run.is_done]
    text = f"{len(trained)} training run{'s' * (len(trained) != 1)}"
    if seeds:
        text += f", seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
    if open_runs:
        text += f". No record of an end: {'; '.join(open_runs[:5])}{' and others' * (len(open_runs) > 5)}"
    return f"{text}."


def results_table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """Return mean and standard deviation over seeds of each metric, a line per method.

    Examples:
        >>> results_table([{"method": "m", "x": 0.5}], "Results").lines
        [['m', '0.500']]
    """
    metrics = without_ends(key for row in rows for key in _numbers(row))
    seeds = {str(row["seed"]) for row in rows if "seed" in row}
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        of_method = [row for row in rows if row["method"] == method]
        known = {name: [row[name] for row in of_method if name in _numbers(row)] for name in metrics}
        shown = (spread(known[n]) + in_brackets(of_method, n) + mark(of_method, n) for n in metrics)
        lines.append([method, *shown])
    caption = f"Mean ± standard deviation over {len(seeds)} seeds." if len(seeds) > 1 else ""
    if any("[" in cell for line in lines for cell in line[1:]):
        ends = ", the mean of its ends over the seeds" if len(seeds) > 1 else ""
        caption += f" In brackets: the 95 % interval within a seed{ends}."
    return Table(title, ["method", *(metric.replace("_", " ") for metric in metrics)], lines, caption)


def _numbers(row: Mapping[str, Any]) -> list[str]:
    """Return the names of a row's metrics."""
    return [key for key, value in row.items() if key not in ("method", "seed") and number(value) is not None]


def runs_table(runs: Sequence[Run]) -> Table:
    """Return a line for each method: model, algorithm, rounds, time and state."""
    lines = [{"run": method, **_facts(of_method)} for method, of_method in by_method(runs).items()]
    caption = "Rounds are epochs where training is centralised."
    if len(lines) < len(runs):
        caption += " Time: mean over seeds."
    if any(run.is_continued for run in runs):
        caption += " Of a run that several commands trained, the time is that of the last one."
    return table_of("What was trained", lines, caption)


def _facts(runs: Sequence[Run]) -> dict[str, str]:
    first = runs[0]
    done = [facts.rounds(run) for run in runs]
    counts = sorted({str(have) if want in (None, have) else f"{have} of {want}" for have, want in done})
    seeds = [str(run.seed) for run in runs if run.seed is not None]
    taken = [run.json("done.json").get("seconds") or run.record().get("seconds") for run in runs]
    times = [seconds for value in taken if (seconds := number(value)) is not None]
    ended = sum(run.is_done for run in runs)
    state = str(first.record().get("state", "")).replace("running", "under way or killed")
    if ended == len(runs) or len(runs) > 1:
        state = "done" if ended == len(runs) else f"{ended} of {len(runs)} done"
    return {
        "algorithm": facts.algorithm(first) or "-",
        "model": facts.model(first) or "-",
        "data": facts.data(first) or "-",
        "clients a round": short(facts.within(first.config(), "federated", "clients_per_round")),
        "rounds": ", ".join(counts),
        "seeds": ", ".join(seeds) or "-",
        "time": in_largest_unit(mean(times)) if times else "-",
        "state": state or "no record of an end",
    }


def stages_table(runs: Sequence[Run], folded: bool) -> Table:
    """Return a table of the runs without training: tests, predictions and calls."""
    lines = []
    for method, of_method in by_method(runs).items():
        stage = str(of_method[0].settings().get("stage") or of_method[0].command or "-")
        command, _, target = stage.partition(" ")  # the name of the target is shown without its folders
        ended = sum(run.is_done for run in of_method)
        what = f"{command} {Path(target).name}".strip()
        lines.append({"stage": method, "what it did": what, "state": f"{ended} of {len(of_method)} done"})
    return table_of("Other stages", lines, folded=folded)


def headline(metrics: Sequence[str]) -> list[str]:
    """Return at most `PANELS` of the metrics, in order; scores come before others.

    Examples:
        >>> headline(["a", "b", "c", "d", "win_rate"])
        ['a', 'b', 'c', 'win_rate']
    """
    chosen = sorted(metrics, key=lambda metric: SCORE.search(metric) is None)[:PANELS]
    return [metric for metric in metrics if metric in chosen]


@matplotlib.rc_context(STYLE)
def draw_results(
    rows: Rows, methods: Sequence[str], metrics: Sequence[str], title: str, name: str, styles: Looks
) -> Chart:
    """Draw a panel for each metric: mean of each method, bar of one standard deviation, dot for each seed."""
    shown = methods[:MOST_METHODS]
    values: Values = {metric: {method: [] for method in shown} for metric in metrics}
    for metric, of_metric in values.items():
        for row in rows:
            if row["method"] in shown and (value := number(row.get(metric))) is not None:
                of_metric[row["method"]].append(value)
    records = [
        {"method": method, "metric": metric, "mean": mean(seeds), "sd": deviation(seeds), "seeds": len(seeds)}
        for metric, of_metric in values.items()
        for method, seeds in of_metric.items()
        if seeds
    ]
    caption = "Large: the mean over seeds, with one standard deviation; small and grey: each seed."
    if all(record["seeds"] == 1 for record in records):
        caption = ""
    if len(shown) < len(methods):
        caption += f" The first {len(shown)} of {len(methods)} methods."
    return Chart(
        f"results_{name}",
        f"{title} at a glance",
        caption.strip(),
        _panels(values, shown, 2 * HALF_A_PAGE[0], 0.32, len(metrics), styles),
        records,
        _panels(values, shown, NARROW, 0.26, min(2, len(metrics)), styles) if len(metrics) > 1 else None,
    )


def _panels(
    values: Values, methods: Sequence[str], wide: float, line: float, columns: int, styles: Looks
) -> Figure:
    """Draw the panels in a grid with so many columns."""
    inches = wide, -(-len(values) // columns) * (1.1 + line * len(methods))
    figure, panels = new_grid(len(values), columns, inches, sharey=True)
    figure.set_layout_engine("constrained", wspace=0.06, hspace=0.04)  # ticks of neighbours do not touch
    for axes, (metric, of_metric) in zip(panels, values.items(), strict=True):
        for place, (method, seeds) in enumerate(of_metric.items()):
            bar: Any = {"fmt": "o", "color": styles[method]["color"], "markersize": 6.5, "capsize": 0}
            if len(seeds) > 1:
                axes.plot(seeds, np.full(len(seeds), place), "o", color="0.6", markersize=3.5)
                bar["xerr"] = deviation(seeds)
            if seeds:
                axes.errorbar(mean(seeds), place, **bar)
        axes.set_title(metric.replace("_", " "), fontsize=10)
        axes.grid(axis="both", color="0.85", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=9, length=0)
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.locator_params(axis="x", nbins=4)
    longest = 2 * LONGEST if wide > NARROW else LONGEST  # else names leave no room for the panels
    panels[0].set_yticks(range(len(methods)), [shortened(name, longest) for name in methods])
    panels[0].set_ylim(len(methods) - 0.5, -0.5)
    return figure


def configuration_section(runs: Sequence[Run]) -> Section | None:
    """Return the differences between the runs that have trained, then all configs, folded."""
    with_config = [run for run in runs if run.config()]
    first_seeds = list({run.method: run for run in reversed(with_config)}.values())[::-1]
    trained = [run for run in first_seeds if run.command in ("fit", "")]
    parts: list[Part] = []
    if len(trained) > 1:
        parts.append(difference(trained[:MOST_COMPARED], len(trained)))
    if table := versions(runs):
        parts.append(table)
    parts += [Code(f"{run.label}: config.yaml", config_text(run)) for run in first_seeds]
    if not parts:
        return None
    intro = "RUN stands for the folder of the run."
    if len(with_config) > len(first_seeds):
        intro += " Of several seeds the first one's config is shown."
    return Section("configuration", "Configuration", intro, parts)


def difference(runs: Sequence[Run], number: int) -> Table:
    """Return a table of the settings that differ between runs; a dash where a run has none."""
    flats = [{key: facts.under(_root(run), value) for key, value in facts.flat(run.config())} for run in runs]
    keys = dict.fromkeys(key for flat in flats for key in flat)
    keys.pop("ckpt_path", None)  # of a resumed run
    texts = [
        {key: shortened("null" if v is None else str(v), LONGEST_VALUE) for key, v in f.items()}
        for f in flats
    ]
    lines = [
        [key, *(text.get(key, "-") for text in texts)]
        for key in keys
        # By repr: lists cannot be in a set, and a text "1" is another setting than the number.
        if len({repr(flat.get(key, SAME_IN_ALL)) for flat in flats}) > 1
    ]
    caption = "Whatever is not listed has the same value in all of these runs."
    if number > len(runs):
        caption += f" The first {len(runs)} of {number} runs."
    header = ["setting", *(run.method for run in runs)]
    return Table("What differs", header, lines, caption, folded=len(lines) > 25)


def _root(run: Run) -> Path:
    return Path(str(facts.within(run.config(), "trainer", "default_root_dir") or run.folder))


def config_text(run: Run) -> str:
    """Return the text of the config file, without the folder of the run."""
    name = run.config_file()
    text = read_text(run.folder / name, errors="replace") if name else ""
    return str(facts.under(run.folder, facts.under(_root(run), text)))


def versions(runs: Sequence[Run]) -> Table | None:
    """Return a line for each set of versions, with the machines in words."""
    records = [(run.method, run.record()) for run in runs]
    if not any(
        isinstance(record.get("versions"), dict) for _, record in records
    ):  # then those of the recipes
        records = [
            (home.name, read_recipe(home).json("results.json")) for home in {run.home: 0 for run in runs}
        ]
    groups: dict[tuple[str, ...], dict[str, None]] = {}  # line -> methods, each once and in their order
    for name, record in records:
        packages = record.get("versions")
        if isinstance(packages, dict):
            line = *(str(packages.get(package, "-")) for package in PACKAGES), str(record.get("machine", "-"))
            groups.setdefault(line, {})[name] = None
    if not groups:
        return None
    lines = [[", ".join(m) if len(m) <= 4 else f"{len(m)} runs", *line] for line, m in groups.items()]
    return Table("Versions", ["runs", *PACKAGES, "machine"], lines)
