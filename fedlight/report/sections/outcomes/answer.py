"""First sentence of a page: the result of the runs, or the settings of runs without a measurement."""

import re
from collections.abc import Mapping, Sequence
from statistics import fmean

from fedlight.evaluation.bootstrap import Interval
from fedlight.judges.finding import finding, win_share
from fedlight.report.parts import capitalized, short
from fedlight.report.sections.curves import Curves, curves, in_words
from fedlight.report.sections.outcomes.comparison import Scores, difference, measures, verdict
from fedlight.report.sections.outcomes.tasks import last_metrics
from fedlight.runs import facts
from fedlight.runs.run import Run, read_recipe
from fedlight.support.words import ends_of, number

PROGRESS = r"^(val|train|fed)/loss$"
"""Losses that tell something where there are two of them."""
MEASURES = (
    r"^win_rate/(?!words)",
    r"^score/[^/]*$",
    r"^(val|test)/accuracy$",
    r"^(val|test)/client_mean$",
    PROGRESS,
    r"loss$",
)
"""Metrics that can be the answer of a single method, the most telling one first."""
MOST = 3
"""Methods with a sentence each where no two can be compared."""
ENDS = 10
"""Share of the steps, one in so many, whose mean loss counts as the first and as the last."""


def answer(runs: Sequence[Run]) -> str:
    """Return the sentence about runs of `fedlight.runs.run.read_runs`; of several recipes, one for each."""
    homes = list(dict.fromkeys(run.home for run in runs))
    findings = {home: finding(read_recipe(home).results()) for home in homes}
    texts = [f"{home.name}: {text}" if len(homes) > 1 else text for home, text in findings.items() if text]
    rest = [run for run in runs if not findings[run.home]]
    return " ".join([*texts, *([_of_runs(rest)] if rest else [])])


def _of_runs(runs: Sequence[Run]) -> str:
    trained = [run for run in runs if run.has_trained]
    # The first measure that all methods have on the same rows; nothing is said where none can be compared.
    methods = {run.method for run in trained}
    common = [(name, each) for (name, _), each in measures(trained).items() if {*each} == methods]
    if common and (compared := _best(*common[0])):
        return compared
    first = {run.method: run for run in reversed(trained or runs)}  # reversed: the first seed stays
    shown = list(first.values())[::-1][:MOST]
    texts = [f"{run.method}: {_of_run(run)}" if len(first) > 1 else _of_run(run) for run in shown]
    more = f", and {len(first) - MOST} more" if len(first) > MOST else ""
    text = "; ".join(texts) + more
    return f"{text if len(first) > 1 else capitalized(text)}."


def _best(name: str, of_methods: Mapping[str, Mapping[str, Scores]]) -> str:
    base, *others = of_methods
    is_loss = not name.startswith("Task ") and "loss" in name.lower()
    sign = -1 if is_loss else 1  # of losses less is better
    gaps = {method: difference(of_methods[method], of_methods[base]) for method in others}
    gains = {method: sign * gain.mean for method, gain in gaps.items() if gain is not None}
    if not gains:
        return ""
    best = max(gains, key=lambda method: gains[method])
    against = gaps[best]
    assert against is not None  # gains has no method without a gap, which mypy cannot see
    sides = (best, short(against.ours)), (base, short(against.ours - against.mean))
    (won, better), (lost, worse) = sides if gains[best] > 0 else sides[::-1]
    first = f"{won}: {name[:1].lower()}{name[1:]} {better} against {worse} of {lost}"
    among = f", the best of {len(gains) + 1} methods" if len(gains) > 1 else ""
    chance = verdict(against).replace("cannot be said", "one seed, so chance is not ruled out")
    return f"{first}{among}, {chance}."


def _of_run(run: Run) -> str:
    """Return the most telling metric of a run before and after training, or its settings."""
    known, last = curves(run), last_metrics(run)
    done, wanted = facts.rounds(run)
    unit = "epochs" if facts.algorithm(run) == "centralised" else "rounds"
    begin = "" if run.is_done or not wanted else f"not finished, {done} of {wanted} {unit}: "
    for pattern in MEASURES:
        for metric in (name for name in {**last, **known.metrics} if re.search(pattern, name)):
            curve = known.metrics.get(metric, {})
            value = number(last.get(metric)) if not curve else curve[max(curve)]
            if value is None or (pattern == PROGRESS and len(curve) < 2):
                continue
            if metric.startswith("win_rate/"):
                low, high = (number(last.get(end)) for end in ends_of(metric))
                ends = Interval(*(float("nan") if end is None else end for end in (low, high)))
                return f"{begin}tuned answers win {win_share(value, ends)} against the raw model, by {metric[9:]}"
            return f"{begin}{in_words(metric)} {_before(known, metric, value)}"
    words = [run.command, facts.algorithm(run), facts.model(run), f"{done} rounds" if done else ""]
    return f"{begin}nothing was measured" + "".join(f", {word}" for word in words if word)


def _before(known: Curves, metric: str, value: float) -> str:
    """Return the value after that of the beginning, where there is an earlier one."""
    curve = known.metrics.get(metric, {})
    if len(curve) < 2:
        return short(value)
    if known.axis == "optimizer step":
        values = [curve[place] for place in sorted(curve)]
        few = max(1, len(values) // ENDS)
        return f"{short(fmean(values[-few:]))} in the last steps, {short(fmean(values[:few]))} in the first"
    first = min(curve)
    moment = f"after {known.axis} {first:g}" if first else "before training"
    return f"{short(value)} after {known.axis} {max(curve):g}, {short(curve[first])} {moment}"
