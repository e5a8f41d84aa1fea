"""Leakage of the clients' rows over the rounds, and against utility.

After Figure 3 of FedDCA (https://arxiv.org/abs/2409.20135) and Figure 3 of FewFedPIT (https://arxiv.org/abs/2403.06131).
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from fedlight.report.figures.lines import (
    MOST_BANDS,
    Panel,
    bands,
    draw_panels,
    draw_scatter,
    over_seeds,
    rows_of,
)
from fedlight.report.figures.privacy_plots import LESS, MORE
from fedlight.report.figures.privacy_table import GLOBAL, UPLOADS, read_attacks
from fedlight.report.figures.style import MOST_LINES, Looks, looks_of, method_looks
from fedlight.report.parts import Chart, Part, Section, Table, capitalized, slug
from fedlight.report.sections.curves import Curve, by_metric
from fedlight.runs.run import Run
from fedlight.support.words import number

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


class Leaked(NamedTuple):
    """Metric of an attack: method -> a curve or value for each seed."""

    trained: dict[str, list[Curve]]  # after training has begun
    last: dict[str, list[float]]  # at the last round that has it in each run
    level: float | None  # mean before training over all runs that have it


def section(runs: Sequence[Run]) -> Section | None:
    """Return charts of each attack and target, a trade-off and a table; None where no run was attacked."""
    attacked: dict[Run, dict[str, dict[str, Curve]]] = {}
    notes = []
    for run in runs:
        if run.path("attacks/attacks.csv") is None:
            continue
        try:
            if run.is_changed("attacks/attacks.csv") or run.is_earlier("attacks/attacks.csv"):
                raise ValueError("it is not what the run wrote")
            attacked[run] = {target: _curves(run, target) for target in TARGETS}
        except (ValueError, OSError, KeyError) as error:
            notes.append(
                f"{run.label}: attacks/attacks.csv cannot be read ({type(error).__name__}) and is left out."
            )
    by_target = {
        target: _leaked((run.method, each[target]) for run, each in attacked.items()) for target in TARGETS
    }
    if not any(by_target.values()) and not notes:
        return None
    styles = looks_of(dict.fromkeys(run.method for run in attacked), method_looks(runs))
    charts: list[Part] = []
    tables: list[Part] = []
    for target, metrics in by_target.items():
        for attack in sorted({metric.partition("/")[0] for metric in metrics}):
            of_attack = {name: metrics[name] for name in sorted(metrics) if name.startswith(f"{attack}/")}
            title, whose = capitalized(attack.replace("_", " ")), TARGETS[target]
            charts.append(_chart(f"{slug(attack)}_{target}", f"{title}: {whose}", of_attack, styles))
            tables.append(_table(f"{title} after the last round: {whose}", of_attack, styles))
    parts = [*charts, *_trade_offs(by_target[GLOBAL], *utilities(runs), styles), *tables]
    intro = "How much of the clients' rows attacks find, by round: less is better. Uploads: a round's mean over clients."
    return Section("leakage", "Leakage of private rows", intro, parts, tuple(notes))


def _curves(run: Run, target: str) -> dict[str, Curve]:
    leakage = read_attacks(str(run.folder), target, needed=False)
    return {
        metric: {float(done): value for done, value in rounds.items()}
        for metric, rounds in leakage.items()
        if not metric.endswith(COUNTED)
    }


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


def _leaked(read: Iterable[tuple[str, Mapping[str, Curve]]]) -> dict[str, Leaked]:
    by_name: dict[str, Leaked] = {}
    for metric, of_methods in by_metric(read).items():
        levels = [curve[0.0] for several in of_methods.values() for curve in several if 0.0 in curve]
        trained: dict[str, list[Curve]] = {}
        for method, several in of_methods.items():
            if after := [{at: curve[at] for at in curve if at} for curve in several if any(curve)]:
                trained[method] = after
        last = {method: [curve[max(curve)] for curve in several] for method, several in trained.items()}
        by_name[metric] = Leaked(trained, last, fmean(levels) if levels else None)
    return by_name


def _chart(name: str, title: str, metrics: Mapping[str, Leaked], styles: Looks) -> Chart:
    rows: list[dict[str, Any]] = []
    panels = []
    for metric, (trained, _, level) in metrics.items():
        lines = {method: over_seeds(several) for method, several in trained.items()}
        panels.append(Panel(lines, in_words(metric), level=level))
        if level is not None:
            rows.append({"metric": metric, "run": "before training", "round": 0, "mean": level})
        rows += [{"metric": metric, **row} for row in rows_of(lines)]
    methods = {method for leaked in metrics.values() for method in leaked.trained}
    several = bands(line for panel in panels for line in panel.lines.values())
    left = len(methods) - MOST_LINES
    return Chart(
        name,
        title,
        f"After each round{', mean over the seeds' if several else ''}; dashed grey: the model before training."
        + (several if len(methods) <= MOST_BANDS else "")
        + (f" {left:,} more runs are in the data alone." if left > 0 else ""),
        draw_panels(panels, styles, across=2),
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


def _trade_offs(
    metrics: Mapping[str, Leaked], task: str, scores: dict[str, list[float]], styles: Looks
) -> list[Chart]:
    charts: list[Chart] = []
    for metric in TRADED:
        ends = metrics[metric].last if metric in metrics else {}
        table = {
            method: {"x": ends[method], "y": scores[method]}
            for method in scores
            if len(ends.get(method, [])) == len(scores[method])
        }
        # Equal leakage is no trade-off.
        if len({tuple(values["x"]) for values in table.values()}) < 2 or len(charts) == 2:
            continue
        attack, words = metric.partition("/")[0].replace("_", " "), in_words(metric)
        x, y = f"{attack}, {words}  {LESS}", f"score of {task}  {MORE}"
        charts.append(
            Chart(
                f"trade_off_{slug(metric)}",
                f"Utility against leakage: {words}",
                f"After the last round: the score of {task} against {attack} of the global model, {words}. "
                "Better is up and to the left. Crosses: standard deviation over the seeds.",
                draw_scatter(table, x, y, styles=styles),
                [
                    {"run": method, "leakage": x, "utility": y}
                    for method, values in table.items()
                    for x, y in zip(values["x"], values["y"], strict=True)
                ],
            )
        )
    return charts


def _table(title: str, metrics: Mapping[str, Leaked], methods: Iterable[str]) -> Table:
    before = [leaked.level for leaked in metrics.values()]
    lines = [["before training", *map(_cell, before)]] if any(level is not None for level in before) else []
    for method in methods:
        ends = [leaked.last.get(method) for leaked in metrics.values()]
        if any(ends):
            lines.append([method, *(_cell(fmean(each) if each else None) for each in ends)])
    return Table(title, ["run", *map(in_words, metrics)], lines, "Means over the seeds.")


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
