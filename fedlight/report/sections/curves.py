"""Curves: every metric over rounds or steps, one line per method, a band over its seeds."""

from collections.abc import Sequence

import matplotlib

from fedlight.report.curves_data import FAMILIES, Curve, Curves, curves, family, said
from fedlight.report.drawing import (
    MOST_LINES,
    MOST_POINTS,
    Line,
    draw_lines,
    key,
    looks,
    new_chart,
    over_seeds,
    slug,
    thinned,
)
from fedlight.report.figures.figures import STYLE
from fedlight.report.parts import Chart, Section
from fedlight.report.runs import Run

TOGETHER = 6  # lines of several metrics that one chart may hold
ORDER = [title for title, _ in FAMILIES] + ["Others"]
FIRST = ("val/", "score/", "win_rate", "fed/", "train/")
Lines = dict[str, Line]


def section(runs: Sequence[Run]) -> Section | None:
    """One chart for each family of metrics, or for each metric where these are too many lines."""
    of_methods: dict[str, list[Curves]] = {}
    for run in runs:
        if run.command in ("fit", "") and (found := curves(run)).metrics:
            of_methods.setdefault(run.method, []).append(found)
    axes = list(dict.fromkeys(found.axis for several in of_methods.values() for found in several))
    charts = [chart for axis in axes for chart in _charts(of_methods, axis)]
    if not charts:
        return None
    intro = "Each line is a run; of several seeds the line is the mean and the band reaches from lowest to highest."
    several = any(len(of_seeds) > 1 for of_seeds in of_methods.values())
    return Section("curves", "Curves", intro if several else "", list(charts))


def _charts(of_methods: dict[str, list[Curves]], axis: str) -> list[Chart]:
    metrics: dict[str, dict[str, list[Curve]]] = {}
    for method, several in of_methods.items():
        for found in several:
            for metric, curve in found.metrics.items() if found.axis == axis else ():
                if family(metric):
                    metrics.setdefault(metric, {}).setdefault(method, []).append(curve)
    # Single values stand in tables; beside curves they are points.
    metrics = {
        metric: found
        for metric, found in metrics.items()
        if any(len(curve) > 1 for several in found.values() for curve in several)
    }
    charts = []
    for title in ORDER:
        of_family = {
            metric: found for metric, found in sorted(metrics.items(), key=_place) if family(metric) == title
        }
        lines_of_family = sum(map(len, of_family.values()))
        if len(of_family) > 1 and lines_of_family <= TOGETHER and title != "Others":
            one_method = len({method for found in of_family.values() for method in found}) == 1
            lines = {
                said(metric) if one_method else f"{method}: {said(metric)}": over_seeds(several)
                for metric, found in of_family.items()
                for method, several in found.items()
            }
            charts.append(_chart(title, title, axis, lines))
        else:
            charts += [
                _chart(metric, _title(metric), axis, {method: over_seeds(x) for method, x in found.items()})
                for metric, found in of_family.items()
            ]
    return charts


def _place(item: tuple[str, object]) -> int:
    """Validation before training."""
    return next((place for place, begin in enumerate(FIRST) if item[0].startswith(begin)), len(FIRST))


def _title(metric: str) -> str:
    words = said(metric)
    return words[0].upper() + words[1:]


@matplotlib.rc_context(STYLE)
def _chart(name: str, title: str, axis: str, lines: Lines) -> Chart:
    shown = dict(list(lines.items())[:MOST_LINES])
    figure, axes = new_chart()
    draw_lines(axes, {label: thinned(line) for label, line in shown.items()}, looks(shown))
    axes.set_xlabel(f"{axis}s" if axis == "optimizer step" else f"{axis}s that are done")
    axes.locator_params(axis="x", integer=True)
    key(figure, axes)
    notes = []
    if len(shown) < len(lines):
        notes.append(f"{len(shown)} of {len(lines)} lines are drawn; the CSV has all.")
    if any(len(line.x) > MOST_POINTS for line in shown.values()):
        notes.append(f"Each point is the mean of neighbouring {axis}s; the CSV has all.")
    last = "; ".join(f"{label}: {line.middle[-1]:.3g} at {line.x[-1]:g}" for label, line in shown.items())
    rows = [
        {"line": label, axis: x, "mean": middle, "low": low, "high": high, "seeds": line.seeds}
        for label, line in lines.items()
        for x, middle, low, high in zip(*(column.tolist() for column in line[:4]), strict=True)
    ]
    where = f" by {axis}"
    return Chart(
        f"curve_{slug(name)}_{slug(axis)}",
        title,
        " ".join(notes),
        f"{title}{where}, last value of each line. {last}",
        figure,
        rows,
    )
