"""Metrics over simulated time: the progress of a federation of emulated devices, in rounds of either mode.

A round of a synchronous run and a server step of a buffered one take unlike times, so their rounds cannot be compared.
"""

import re
from collections.abc import Mapping, Sequence

import numpy as np

from fedlight.report.figures.lines import Line, line_chart
from fedlight.report.figures.style import Looks, method_looks
from fedlight.report.parts import Chart, Section, capitalized, slug
from fedlight.report.sections.curves import Curve, by_metric, curves, family, in_words
from fedlight.report.visits import visits_of
from fedlight.runs.run import Run
from fedlight.support.words import in_largest_unit, time_unit

SHOWN = re.compile(r"^(val/|score/|group_mean/|win_rate)(?!.*_(low|high)$)")
"""Metrics of the global model, without the ends of intervals."""
FAMILIES = ("Accuracy by client", "Accuracy", "Task scores", "Win rate", "Loss")


def section(runs: Sequence[Run]) -> Section | None:
    """Return a chart for each metric of the global model; None where no run has devices and such a metric."""
    metrics = by_metric((run.method, over_time(run)) for run in runs)
    known = method_looks(runs)
    charts = [_chart(metric, metrics[metric], known) for metric in sorted(metrics)]
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
        if SHOWN.search(metric) and family(metric) in FAMILIES
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
    return Line(x, values.mean(axis=0), values.min(axis=0), values.max(axis=0), len(runs))


def _chart(metric: str, of_methods: Mapping[str, Sequence[Curve]], known: Looks) -> Chart:
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
