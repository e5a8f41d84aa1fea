"""Curves: every metric over rounds or steps, one line per method, a band over its seeds; and over simulated time.

A round of a synchronous run and a server step of a buffered one take unlike times, so their rounds cannot be compared.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedlight.report.figures.lines import Line, line_chart, over_seeds
from fedlight.report.figures.style import Looks, method_looks
from fedlight.report.parts import Chart, Part, Section, capitalized, slug
from fedlight.report.visits import visits_of
from fedlight.runs.facts import class_name
from fedlight.runs.rows import Rows, epochs_done
from fedlight.runs.run import Run, by_method
from fedlight.support.words import ends_of, in_largest_unit, number, time_unit

FEWEST_EPOCHS = 3  # below, a run that is not federated is drawn over its steps
Curve = dict[float, float]
"""Round, epoch or step -> value."""
ByMetric = dict[str, dict[str, list[Curve]]]
"""Metric -> method -> curves of its runs."""

FAMILIES = (
    ("Accuracy by client", r"client_(mean|worst|std)"),
    ("Accuracy", r"accuracy"),
    ("Task scores", r"^(score|group_mean|low|high)/"),
    ("Win rate", r"^win_rate|/win_rate"),
    ("Loss", r"(^|/)loss"),
    ("Synthetic data", r"^fed/synthetic/"),
)
# Drawn by the sections on devices, groups and leakage, or no result.
ELSEWHERE = re.compile(
    r"^(attack|unread|win_rate_unread)/|^fed/(bytes|clients|hours|joules|absent|asked|at_work|late|left|old_model|out_of|surplus|round_|group)|^lr-"
)
SAID = {
    "train/loss": "loss of training batches",
    "val/loss": "validation loss",
    "fed/loss": "loss during visits",
    "fed/product_error": "relative distance of the averaged adapter from the mean of the clients' products",
    "fed/staleness": "staleness of updates, in server steps",
    "fed/staleness_max": "largest staleness, in server steps",
    "val/accuracy": "validation accuracy",
    "win_rate/words": "words of all answers, relative to the raw model's",
    "val/client_mean": "mean over clients",
    "val/client_worst_tenth": "mean of the worst tenth of clients",
    "val/client_std": "standard deviation over clients",
    "val/own_client_mean": "mean over clients, own selectors",
    "val/own_client_worst_tenth": "worst tenth, own selectors",
    "val/own_client_std": "standard deviation, own selectors",
}
BEGINNINGS = {
    "score/": "score of ",
    "group_mean/": "mean over groups, score of ",
    "win_rate/": "win rate by ",
    "win_rate_equal_length/": "win rate at equal length by ",
    "fed/loss/": "loss during visits, ",
}

SCORES = ("score/", "group_mean/", "low/", "high/")
"""Metrics of tasks that are drawn: scores, and the ends of their intervals."""
ORDER = [title for title, _ in FAMILIES] + ["Others"]
FIRST = ("val/", "score/", "win_rate", "fed/", "train/")
SHOWN = re.compile(r"^(val/|score/|group_mean/|win_rate(?!_low|_high))(?!.*_(low|high)$)")
"""Metrics of the global model, without the ends of intervals."""
OVER_TIME = ("Accuracy by client", "Accuracy", "Task scores", "Win rate", "Loss")


class Curves(NamedTuple):
    """Curves of one run."""

    axis: str  # ``round``, counted by rounds that are done, ``epoch``, or ``optimizer step``
    metrics: dict[str, Curve]  # name -> position -> value
    objective: str = ""  # class of the module: losses of other classes are other metrics


def section(runs: Sequence[Run]) -> Section | None:
    """Return a chart for each metric, those of a family beside each other."""
    grouped = by_method([run for run in runs if run.command in ("fit", "")])
    read = [
        (run.method, each) for several in grouped.values() for run in several if (each := curves(run)).metrics
    ]
    known = method_looks(runs)
    charts: list[Part] = []
    zeros: set[str] = set()
    for axis in dict.fromkeys(each.axis for _, each in read):
        metrics = _over(axis, read)
        nothing = _zeros(metrics)
        zeros |= {*map(in_words, nothing)}
        charts += _charts({name: metrics[name] for name in metrics if name not in nothing}, axis, known)
    if not charts:
        return None
    several = len({method for method, _ in read}) < len(read)
    intro = "Each line is a run; of several seeds it is the mean."
    not_drawn = f"0 in all runs at all times, and not drawn: {', '.join(sorted(zeros))}." if zeros else ""
    return Section("curves", "Curves", f"{intro * several} {not_drawn}".strip(), charts)


def by_metric(runs: Iterable[tuple[str, Mapping[str, Curve]]]) -> ByMetric:
    """Return metric -> method -> its curve in each run that has one, from the method and the curves of each run.

    Examples:
        >>> by_metric([("a", {"x": {1.0: 0.5}}), ("b", {}), ("a", {"x": {1.0: 0.25}})])
        {'x': {'a': [{1.0: 0.5}, {1.0: 0.25}]}}
    """
    metrics: ByMetric = {}
    for method, curves_of_run in runs:
        for metric, curve in curves_of_run.items():
            metrics.setdefault(metric, {}).setdefault(method, []).append(curve)
    return metrics


def _over(axis: str, read: Sequence[tuple[str, Curves]]) -> ByMetric:
    """Return the curves that this section draws over the axis.

    Losses of unlike modules are unlike metrics, named ``val/loss, SFTModule``.
    """
    of_axis = [(method, each) for method, each in read if each.axis == axis]
    are_unlike = len({each.objective for _, each in of_axis}) > 1

    def name(metric: str, objective: str) -> str:
        is_told = are_unlike and family(metric) == "Loss"
        return f"{metric}, {objective or 'unknown module'}" if is_told else metric

    return by_metric(
        (
            method,
            {name(metric, each.objective): each.metrics[metric] for metric in each.metrics if family(metric)},
        )
        for method, each in of_axis
    )


def _zeros(metrics: ByMetric) -> set[str]:
    """Return the counts of events that never happened: metrics outside of the families that are 0 everywhere."""
    return {
        metric
        for metric, of_methods in metrics.items()
        if family(metric) == "Others"
        and not any(any(curve.values()) for several in of_methods.values() for curve in several)
    }


def _charts(metrics: ByMetric, axis: str, known: Looks) -> list[Chart]:
    def place(metric: str) -> int:  # validation before training
        return next((at for at, begin in enumerate(FIRST) if metric.startswith(begin)), len(FIRST))

    ends = {metric: ends_of(metric) for metric in metrics if set(ends_of(metric)) <= metrics.keys()}
    intervals = {metric: [metrics[end] for end in pair] for metric, pair in ends.items()}
    drawn = {
        metric: metrics[metric]
        for metric in sorted(metrics, key=place)
        if not any(metric in pair for pair in ends.values())  # ends are drawn as a band
        # Single values are in tables; beside curves they are points.
        and any(len(curve) > 1 for several in metrics[metric].values() for curve in several)
    }
    charts = []
    for title in ORDER:
        of_family = {metric: of_methods for metric, of_methods in drawn.items() if family(metric) == title}
        for metric, of_methods in of_family.items():
            lines = {m: _line(m, several, intervals.get(metric)) for m, several in of_methods.items()}
            has_intervals = any((line.high > line.low)[line.seeds == 1].any() for line in lines.values())
            charts.append(
                line_chart(
                    f"curve_{slug(metric)}_{slug(axis)}",
                    capitalized(in_words(metric)),
                    "Band of a single seed: the 95 % interval." if has_intervals else "",
                    lines,
                    known,
                    f"{axis}s" if axis == "optimizer step" else f"{axis}s that are done",
                    column=axis,
                    label="line",
                )
            )
    return charts


def _line(method: str, several: Sequence[Curve], intervals: Sequence[dict[str, list[Curve]]] | None) -> Line:
    """Return the line of a method: its band is that over the seeds, of a single seed the interval where it has one."""
    line = over_seeds(several)
    # Of several seeds the band is theirs.
    if intervals is None or len(several) > 1 or not all(method in of_end for of_end in intervals):
        return line
    low, high = (
        np.array([of_end[method][0].get(at, middle) for at, middle in zip(line.x, line.middle, strict=True)])
        for of_end in intervals
    )
    return line._replace(low=low, high=high)


def in_words(metric: str) -> str:
    """Return a metric in words; an unknown one as its last part, the others in brackets.

    Examples:
        >>> in_words("val/loss"), in_words("score/domain"), in_words("win_rate/oracle"), in_words("fed/loss/train")
        ('validation loss', 'score of domain', 'win rate by oracle', 'loss during visits, train')
        >>> in_words("train/reward_margin"), in_words("fed/synthetic/rows"), in_words("my_own")
        ('reward margin (train)', 'rows (fed, synthetic)', 'my own')
    """
    if metric in SAID:
        return SAID[metric]
    if metric.partition(", ")[0] in SAID:
        return SAID[metric.partition(", ")[0]] + metric[metric.index(", ") :]
    for begin, words in BEGINNINGS.items():
        if metric.startswith(begin):
            return words + metric.removeprefix(begin).replace("/", ", ")
    *parts, name = metric.split("/")
    words = name.replace("_", " ").strip() or metric
    return f"{words} ({', '.join(parts).replace('_', ' ')})" if parts else words


def family(metric: str) -> str | None:
    """Return the title of the chart that a metric belongs to; None where another section draws it.

    Examples:
        >>> family("val/loss"), family("fed/bytes_up"), family("win_rate_unread/oracle"), family("my/own")
        ('Loss', None, None, 'Others')
    """
    if ELSEWHERE.search(metric):
        return None
    return next((title for title, pattern in FAMILIES if re.search(pattern, metric)), "Others")


def curves(run: Run) -> Curves:
    """Return the CSV logger's metrics, losses of visits where it has none, and the scores of tasks by their files."""
    rows = run.metrics()
    epochs = {epoch for row in rows if (epoch := number(row.get("epoch"))) is not None}
    federated = bool(run.config().get("federated")) or run.path("visits.csv") is not None
    by_epoch = federated or len(epochs) >= FEWEST_EPOCHS
    metrics = columns(rows, by_epoch)
    if by_epoch:
        # Logged values come first, but for scores of tasks, whose files name their round.
        metrics = visit_losses(run) | metrics | task_scores(run)
        if federated and metrics.get("fed/loss", {}).keys() == metrics.get("train/loss", {}).keys():
            metrics.pop("fed/loss", None)  # means of the same batches
    axis = "round" if federated else "epoch" if by_epoch else "optimizer step"
    kept = {metric: curve for metric, curve in metrics.items() if curve}
    return Curves(axis, kept, class_name(run.config().get("model")))


def columns(rows: Rows, by_epoch: bool) -> dict[str, Curve]:
    """Return the columns of a metrics file: means of each epoch, counted from 1, or the values of each step.

    Examples:
        >>> rows = [{"epoch": "0", "step": "0", "x": "1"}, {"epoch": "0", "step": "1", "x": "2"}]
        >>> columns(rows, by_epoch=True), columns(rows, by_epoch=False)
        ({'x': {1.0: 1.5}}, {'x': {0.0: 1.0, 1.0: 2.0}})
    """
    by_metric: dict[str, dict[float, list[float]]] = {}
    places = epochs_done(rows) if by_epoch else [number(row.get("step")) for row in rows]
    for row, place in zip(rows, places, strict=True):
        if place is None:
            continue
        for metric, text in row.items():
            if text and metric not in ("epoch", "step") and (value := number(text)) is not None:
                by_metric.setdefault(metric, {}).setdefault(place, []).append(value)
    return {
        metric: {place: sum(values) / len(values) for place, values in sorted(curve.items())}
        for metric, curve in by_metric.items()
    }


def visit_losses(run: Run) -> dict[str, Curve]:
    """Return the mean loss of each round's visits, weighted by steps, for each split."""
    by_split: dict[str, dict[float, list[tuple[float, float]]]] = {}
    for row in run.csv("visits.csv"):
        place, loss, steps = (number(row.get(name)) for name in ("round", "loss", "steps"))
        if place is not None and loss is not None and steps:
            by_split.setdefault(row.get("split", ""), {}).setdefault(place + 1, []).append(
                (loss * steps, steps)
            )
    return {
        f"fed/loss/{split}" if len(by_split) > 1 else "fed/loss": {
            place: sum(loss for loss, _ in visits) / sum(steps for _, steps in visits)
            for place, visits in rounds.items()
        }
        for split, rounds in by_split.items()
    }


def task_scores(run: Run) -> dict[str, Curve]:
    """Return the tasks' scores by round; 0 is before training."""
    scores: dict[str, Curve] = {}
    folder = run.path("tasks")
    for moment in sorted(folder.iterdir()) if folder else []:
        place = re.fullmatch(r"epoch_(\d+)|start", moment.name)
        if place is None:
            continue
        for metric, value in run.json(f"tasks/{moment.name}/scores.json").items():
            if (score := number(value)) is not None and metric.startswith(SCORES):
                scores.setdefault(metric, {})[float(place[1] or 0)] = score
    return scores


def time_section(runs: Sequence[Run]) -> Section | None:
    """Return a chart for each metric of the global model; None where no run has devices and such a metric."""
    metrics = by_metric((run.method, over_time(run)) for run in runs)
    known = method_looks(runs)
    charts = [_time_chart(metric, metrics[metric], known) for metric in sorted(metrics)]
    if not charts:
        return None
    intro = (
        "On the devices' virtual clock, so that runs whose rounds take unlike times stand beside each other: each "
        "point is the model that the server has at that moment."
    )
    return Section("virtual_time", "Simulated time", intro, [*charts])


def over_time(run: Run) -> dict[str, Curve]:
    """Return metric -> simulated seconds -> value at the end of each round that was evaluated; empty without a fleet."""
    visits = visits_of(run.csv("visits.csv"))
    if visits is None or not visits.device_names:
        return {}
    ends = dict(enumerate(visits.round_ends().tolist(), start=1)) | {0: 0.0}  # before training at 0 seconds
    shown = {
        metric: {ends[int(place)]: value for place, value in curve.items() if int(place) in ends}
        for metric, curve in curves(run).metrics.items()
        if SHOWN.search(metric) and family(metric) in OVER_TIME
    }
    return {metric: curve for metric, curve in shown.items() if len(curve) > 1}


def held(runs: Sequence[Curve]) -> Line:
    """Return the mean over seeds at each moment that gives one of them a new model, while all of them run.

    Between two of its rounds a run has the value of the earlier one.

    Examples:
        >>> line = held([{1.0: 0.0, 3.0: 1.0}, {2.0: 0.5, 4.0: 1.0}])
        >>> line.x.tolist(), line.middle.tolist(), line.low.tolist(), line.high.tolist()
        ([2.0, 3.0], [0.25, 0.75], [0.0, 0.5], [0.5, 1.0])
    """
    # Before and after these moments the mean would be over fewer runs.
    first, last = max(min(curve) for curve in runs), min(max(curve) for curve in runs)
    x = np.array(sorted({at for curve in runs for at in curve if first <= at <= last}))
    series = [(np.array(sorted(curve)), np.array([curve[at] for at in sorted(curve)])) for curve in runs]
    # The last one at or before each moment.
    each = [values[np.searchsorted(times, x, side="right") - 1] for times, values in series]
    values = np.array(each).reshape(len(runs), -1)
    return Line(x, values.mean(axis=0), values.min(axis=0), values.max(axis=0), np.full(len(x), len(runs)))


def _time_chart(metric: str, of_methods: Mapping[str, Sequence[Curve]], known: Looks) -> Chart:
    lines = {method: line for method, runs in of_methods.items() if len((line := held(runs)).x)}
    scale, unit = time_unit(max((float(line.x[-1]) for line in lines.values()), default=1.0))
    common = min((float(line.x[-1]) for line in lines.values()), default=0.0)
    values = "; ".join(
        f"{name}: {line.middle[np.searchsorted(line.x, common, side='right') - 1]:.3g}"
        for name, line in lines.items()
        if line.x[0] <= common
    )
    return line_chart(
        f"time_{slug(metric)}",
        f"{capitalized(in_words(metric))} over simulated time",
        f"At {in_largest_unit(common)}, when the first run ends: {values}.",
        lines,
        known,
        f"simulated time, {unit}",
        column="seconds",
        scale=scale,
    )
