"""Leakage of the clients' rows over the rounds, and against utility.

After Figure 3 of FedDCA (https://arxiv.org/abs/2409.20135) and Figure 3 of FewFedPIT (https://arxiv.org/abs/2403.06131).
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from fedlight.report.figures.lines import (
    MOST_BANDS,
    Line,
    Panel,
    bands,
    draw_panels,
    draw_scatter,
    over_seeds,
    rows_of,
)
from fedlight.report.figures.privacy_plots import LESS, MORE
from fedlight.report.figures.privacy_table import GLOBAL, UPLOADS, Leakage, read_attacks
from fedlight.report.figures.style import MOST_LINES, Looks, looks_of, method_looks
from fedlight.report.parts import Chart, Part, Section, Table, capitalized, slug
from fedlight.runs.rows import number
from fedlight.runs.run import Run

TARGETS = {GLOBAL: "the global model", UPLOADS: "clients' uploads"}
SAID = {
    "auc": "AUC",
    "canaries": "canaries found",
    "chance": "random secrets found",
    "coverage": "others' items found",
    "efficiency": "others' items found, per text",
    "exact": "exact matches",
    "exposure": "exposure (bits)",
    "extracted": "different rows written out",
    "identifiers": "numbers and codes found",
    "rouge_l": "ROUGE-L",
    "rouge_l_best": "ROUGE-L, best row",
    "tpr_at_0.01_fpr": "TPR at 0.01 FPR",
    "tpr_at_0.1_fpr": "TPR at 0.1 FPR",
}
SCORES = {"loss_": "loss alone", "min_k_": "Min-K%", "lira_": "LiRA's logits"}
SCORES |= {"rounds_mean_": "mean over rounds", "rounds_slope_": "slope over rounds"}
"""Beginning of a metric of membership inference -> the score that it is of."""
COUNTED = "left_out", "queries"  # rows that were too long for an attack, and its texts: no leakage
TRADED = (
    "discoverable_memorization/canaries",
    "discoverable_memorization/rouge_l",
    "memory_extraction/rouge_l",
    "membership_inference/auc",
)
"""Of the global model, against utility; the first two that differ between methods."""

ByMethod = dict[str, list[Leakage]]
"""Method -> what attacks found in the run of each seed."""


def section(runs: Sequence[Run]) -> Section | None:
    """Return charts of each attack and target, a trade-off and a table; None where no run was attacked."""
    by_target: dict[str, ByMethod] = {target: {} for target in TARGETS}
    notes = []
    for run in runs:
        if run.path("attacks/attacks.csv") is None:
            continue
        try:
            if run.is_changed("attacks/attacks.csv"):
                raise ValueError("it is not what the run wrote")
            each = {target: read_attacks(str(run.folder), target, needed=False) for target in TARGETS}
        except (ValueError, OSError, KeyError) as error:
            notes.append(
                f"{run.label}: attacks/attacks.csv cannot be read ({type(error).__name__}) and is left out."
            )
            continue
        for target, leakage in each.items():
            if leakage:
                by_target[target].setdefault(run.method, []).append(leakage)
    if not any(by_target.values()) and not notes:
        return None
    styles = looks_of(
        (method for of_target in by_target.values() for method in of_target), method_looks(runs)
    )
    attacks = [
        (attack, target)
        for target, of_target in by_target.items()
        for attack in sorted({metric.partition("/")[0] for metric in metrics_of(of_target)})
    ]
    parts: list[Part] = [_chart(attack, target, by_target[target], styles) for attack, target in attacks]
    parts += _trade_offs(by_target[GLOBAL], *utilities(runs), styles)
    parts += [_table(attack, target, by_target[target]) for attack, target in attacks]
    intro = "How much of the clients' rows attacks find, by round: less is better. Uploads: a round's mean over clients."
    return Section("leakage", "Leakage of private rows", intro, parts, tuple(notes))


def metrics_of(by_method: ByMethod, begin: str = "") -> list[str]:
    """Return the metrics that any run has, in order, of those that begin like this."""
    rounds = (values for runs in by_method.values() for run in runs for values in run.values())
    every = {name for values in rounds for name in values}
    return sorted(name for name in every if name.startswith(begin) and not name.endswith(COUNTED))


def in_words(metric: str) -> str:
    """Return a metric of an attack in words.

    Examples:
        >>> in_words("discoverable_memorization/exact"), in_words("membership_inference/tpr_at_0.1_fpr")
        ('exact matches', 'TPR at 0.1 FPR')
    """
    name = metric.partition("/")[2] or metric
    for begin, score in SCORES.items():
        if name.startswith(begin):
            return f"{in_words(name.removeprefix(begin))}, by {score}"
    return SAID.get(name, name.replace("_", " "))


def series_of(by_method: ByMethod, metric: str) -> tuple[dict[str, Line], float | None]:
    """Return a metric over rounds for each method, and its mean before training over all runs that have it."""
    lines: dict[str, Line] = {}
    levels: list[float] = []
    for method, runs in by_method.items():
        values = [{float(done): each[metric] for done, each in run.items() if metric in each} for run in runs]
        levels += [each.pop(0.0) for each in values if 0.0 in each]
        values = [each for each in values if each]
        if values:
            lines[method] = over_seeds(values)
    return lines, fmean(levels) if levels else None


def _chart(attack: str, target: str, by_method: ByMethod, styles: Looks) -> Chart:
    metrics = metrics_of(by_method, f"{attack}/")
    series = {metric: series_of(by_method, metric) for metric in metrics}
    rows: list[dict[str, Any]] = []
    for metric, (lines, level) in series.items():
        if level is not None:
            rows.append({"metric": metric, "run": "before training", "round": 0, "mean": level})
        rows += [{"metric": metric, **row} for row in rows_of(lines)]
    panels = [Panel(lines, in_words(metric), level=level) for metric, (lines, level) in series.items()]
    has_bands = len(by_method) <= MOST_BANDS
    several = bands(line for lines, _ in series.values() for line in lines.values())
    left = len(by_method) - MOST_LINES
    return Chart(
        f"{slug(attack)}_{target}",
        f"{capitalized(attack.replace('_', ' '))}: {TARGETS[target]}",
        f"After each round{', mean over the seeds' if several else ''}; dashed grey: the model before training."
        + (several if has_bands else "")
        + (f" {left:,} more runs are in the data alone." if left > 0 else ""),
        draw_panels(panels, styles, "rounds that are done", across=2),
        rows,
    )


def utilities(runs: Sequence[Run]) -> tuple[str, dict[str, list[float]]]:
    """Return the task most attacked methods have scored, and their scores by seed: means of clients' models, if scored."""
    scores: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        metrics = run.done().get("metrics", {})
        if run.path("attacks/attacks.csv") is None or not isinstance(metrics, dict):
            continue
        for task in (name.removeprefix("score/") for name in metrics if name.startswith("score/")):
            value = number(metrics.get(f"own/{task}/client_mean", metrics[f"score/{task}"]))
            if value is not None:
                scores.setdefault(task, {}).setdefault(run.method, []).append(value)
    if not scores:
        return "", {}
    task = max(scores, key=lambda name: len(scores[name]))
    return task, scores[task]


def _trade_offs(by_method: ByMethod, task: str, scores: dict[str, list[float]], styles: Looks) -> list[Chart]:
    charts: list[Chart] = []
    for metric in TRADED:
        ends = last(by_method, metric)
        table = {
            method: {"x": ends[method], "y": scores[method]}
            for method in scores
            if len(ends.get(method, [])) == len(scores[method])
        }
        # Equal leakage is no trade-off.
        if len({tuple(values["x"]) for values in table.values()}) < 2 or len(charts) == 2:
            continue
        attack = metric.partition("/")[0].replace("_", " ")
        charts.append(
            Chart(
                f"trade_off_{slug(metric)}",
                f"Utility against leakage: {in_words(metric)}",
                f"After the last round: the score of {task} against {attack} of the global model, {in_words(metric)}. "
                "Better is up and to the left. Crosses: standard deviation over the seeds.",
                draw_scatter(
                    table, f"{attack}, {in_words(metric)}  {LESS}", f"score of {task}  {MORE}", styles=styles
                ),
                [
                    {"run": method, "leakage": x, "utility": y}
                    for method, values in table.items()
                    for x, y in zip(values["x"], values["y"], strict=True)
                ],
            )
        )
    return charts


def last(by_method: ByMethod, metric: str) -> dict[str, list[float]]:
    """Return a metric at the last round that has it in each run, without the level before training."""
    ends = {
        method: [
            values[-1]
            for run in runs
            if (values := [e[metric] for done, e in run.items() if done and metric in e])
        ]
        for method, runs in by_method.items()
    }
    return {method: values for method, values in ends.items() if values}


def _table(attack: str, target: str, by_method: ByMethod) -> Table:
    metrics = metrics_of(by_method, f"{attack}/")
    ends = {metric: last(by_method, metric) for metric in metrics}
    before = [series_of(by_method, metric)[1] for metric in metrics]
    lines = [["before training", *map(_cell, before)]] if any(level is not None for level in before) else []
    for method in by_method:
        values = [ends[metric].get(method) for metric in metrics]
        if any(values):
            lines.append([method, *(_cell(fmean(of_seeds) if of_seeds else None) for of_seeds in values)])
    title = f"{capitalized(attack.replace('_', ' '))} after the last round: {TARGETS[target]}"
    return Table(title, ["run", *map(in_words, metrics)], lines, "Means over the seeds.")


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
