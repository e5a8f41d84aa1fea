"""Comparison of methods: differences with intervals, paired by client, by question and by seed.

Two kinds of chance are kept apart. Other clients or questions would have given other means: that is the bootstrap over
those that two methods share. Another seed would have given other models: that takes several seeds, and is Student's
interval of their differences (see `fedlight.evaluation.bootstrap`).
"""

import math
import re
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from fedlight.evaluation.bootstrap import Interval, bootstrap_interval, student_interval
from fedlight.report.figures.plots import common_stages, final
from fedlight.report.parts import Part, Section, Table, capitalized, short, table_of
from fedlight.report.sections.answers import scored_rows, tasks
from fedlight.report.sections.curves import in_words
from fedlight.report.sections.outcomes.tasks import last_metrics
from fedlight.runs import facts
from fedlight.runs.run import Run
from fedlight.support.words import number

METRICS = re.compile(r"^(val|test)/(accuracy|loss|client_mean|accuracy_both_orders)$|^win_rate/(?!words)")
"""Of which there is a single value in each run, so that seeds alone can tell."""
TEST_ROWS = ["split.test_source", "split.test_split", "limit", "columns"]
ROWS = [*TEST_ROWS, "source", "split", "view", "exclude", "rows.few_shot", "partition"]
"""Settings of the data that decide which rows are for validation and test."""
SINGLE = "the run"
FEWEST_PAIRS = 6
"""Clients or questions from which on chance can be told: five differences of one sign happen by chance in 6 % of cases."""
BEYOND, WITHIN, UNKNOWN = "beyond noise", "within noise", "cannot be said"

Scores = dict[str, float]
"""Client or question -> score; `SINGLE` for a metric of the whole run."""


class Difference(NamedTuple):
    """Mean of a method minus that of the method that it is compared with."""

    mean: float
    ours: float  # mean of the method itself, over the same pairs and seeds
    pairs: int  # clients or questions that both have, over all seeds; 0 for a metric of whole runs
    over_pairs: Interval  # NaN for fewer clients or questions than `FEWEST_PAIRS`
    over_seeds: Interval  # NaN for fewer than two seeds
    seeds: int  # that both have


Measures = dict[tuple[str, str], dict[str, dict[str, Scores]]]
"""Name of a measure and the rows that it was taken on -> method -> seed -> scores."""


def section(runs: Sequence[Run]) -> Section | None:
    """Return a table for each measure that several methods have on the same rows; None without any."""
    by_measure = measures(runs)
    tables = [_table(name, of_methods) for (name, _), of_methods in by_measure.items()]
    parts: list[Part] = [table for table in tables if table.lines]
    if not parts:
        return None
    most = max(len(of_seeds) for of_methods in by_measure.values() for of_seeds in of_methods.values())
    intro = "Which differences are more than chance, with 95 % intervals of paired differences."
    one_seed = (
        "Each method was trained with one seed. An interval over clients or questions is about these very models. "
        "Several seeds would tell whether training again gives the same order."
    )
    return Section("comparison", "Comparison of methods", intro, parts, () if most > 1 else (one_seed,))


def measures(runs: Sequence[Run]) -> Measures:
    """Return the measures that at least two methods have on the same rows."""
    by_measure: Measures = {}

    def add(name: str, rows: str, run: Run, scores: Scores) -> None:
        if scores:
            of_methods = by_measure.setdefault((name, rows), {})
            of_methods.setdefault(run.method, {}).setdefault(str(run.seed), scores)

    stages = common_stages(run.csv("clients.csv") for run in runs)
    for run in runs:
        rows = run.csv("clients.csv")
        is_test = any(row.get("stage") in ("own", "test") for row in rows)
        # The number of examples is part of the name: other data under the same client's name are no pair.
        clients = {
            f"{client} ({examples})": value for (client, examples), value in final(rows, stages).items()
        }
        add("Accuracy by client", measured_on(run, is_test), run, clients)
        for task in tasks(run):
            add(f"Task {task}", facts.task_class(run, task), run, _of_questions(run, task))
        for metric, value in last_metrics(run).items():
            if METRICS.search(metric) and (score := number(value)) is not None:
                about = measured_on(run, metric.startswith("test/"), metric.endswith("loss"))
                add(capitalized(in_words(metric)), about, run, {SINGLE: score})
    return {about: of_methods for about, of_methods in by_measure.items() if len(of_methods) > 1}


def measured_on(run: Run, is_test: bool, is_loss: bool = False) -> str:
    """Return the settings that choose the rows of a metric, without the seed; empty without a config.

    A loss also depends on the objective and on the tokens, so it has the module and its model as well.
    """
    config = run.config()
    names = TEST_ROWS if is_test and facts.within(config, "data", "split", "test_source") else ROWS
    values = [facts.within(config, "data", *name.split(".")) for name in names]
    if is_loss:
        values += [facts.class_name(config.get("model")), facts.within(config, "model", "model")]
    # Sources name the seed as an option or as a folder.
    return re.sub(r"seed[=_]?\d+", "seed", repr(values)) if config else ""


def _of_questions(run: Run, task: str) -> Scores:
    scores: dict[str, list[float]] = {}
    for row, score in scored_rows(run, task):
        scores.setdefault(f"{row.get('row')} {row.get('prompt')}", []).append(score)
    return {question: fmean(values) for question, values in scores.items()}


def difference(ours: Mapping[str, Scores], theirs: Mapping[str, Scores]) -> Difference | None:
    """Return the mean difference over all pairs of all seeds; None where the two share nothing.

    Examples:
        >>> gap = difference({"0": {"a": 1.0, "b": 0.5}}, {"0": {"a": 0.5, "b": 0.0, "c": 1.0}})
        >>> gap.mean, gap.ours, gap.pairs, gap.over_pairs, gap.seeds
        (0.5, 0.75, 2, Interval(low=nan, high=nan), 1)
    """
    shared = [(scores, theirs[seed]) for seed, scores in ours.items() if seed in theirs]
    by_seed = [{pair: mine[pair] - other[pair] for pair in mine if pair in other} for mine, other in shared]
    by_seed = [gaps for gaps in by_seed if gaps]
    if not by_seed:
        return None
    ours_alone = [mine[pair] for mine, other in shared for pair in mine if pair in other]
    values = [value for gaps in by_seed for value in gaps.values()]
    pairs = [pair for gaps in by_seed for pair in gaps]
    number = 0 if set(pairs) == {SINGLE} else len(pairs)
    over_pairs = Interval(math.nan, math.nan)
    if len(set(pairs)) >= FEWEST_PAIRS:
        over_pairs = bootstrap_interval(values, pairs)  # a client of several seeds is drawn with all of them
    over_seeds = student_interval([fmean(gaps.values()) for gaps in by_seed])
    return Difference(fmean(values), fmean(ours_alone), number, over_pairs, over_seeds, len(by_seed))


def verdict(gap: Difference) -> str:
    """Return in words whether a difference is more than chance; every interval that is known has to leave out zero.

    Examples:
        >>> verdict(Difference(0.1, 0.7, 0, Interval(math.nan, math.nan), Interval(math.nan, math.nan), 1))
        'cannot be said'
        >>> verdict(Difference(0.1, 0.7, 9, Interval(0.05, 0.2), Interval(-0.1, 0.3), 2))
        'within noise'
        >>> verdict(Difference(0.1, 0.7, 9, Interval(0.05, 0.2), Interval(math.nan, math.nan), 1))
        'beyond noise for these models'
    """
    known = [ends for ends in (gap.over_pairs, gap.over_seeds) if not math.isnan(ends.low)]
    if not known:
        return UNKNOWN
    if any(low <= 0 <= high for low, high in known):
        return WITHIN
    return BEYOND if gap.seeds > 1 else f"{BEYOND} for these models"


def _table(name: str, of_methods: Mapping[str, Mapping[str, Scores]]) -> Table:
    """Compare every method with the first one."""
    first, *others = of_methods
    compared = {method: difference(of_methods[method], of_methods[first]) for method in others}
    shared = {method: gap for method, gap in compared.items() if gap is not None}
    what = "clients" if name == "Accuracy by client" else "questions"
    is_single = all(not gap.pairs for gap in shared.values())
    lines = [
        {
            "method": method,
            "verdict": verdict(gap),  # first: a phone shows two columns
            "mean": short(gap.ours),
            "difference": f"{gap.mean:+.3f}",
            **({} if is_single else {f"over {what}": _ends(gap.over_pairs), "pairs": f"{gap.pairs:,}"}),
            "over seeds": _ends(gap.over_seeds),
            "seeds": str(gap.seeds),
        }
        for method, gap in shared.items()
    ]
    bases = {short(gap.ours - gap.mean) for gap in shared.values()}
    # Methods may share other seeds with it.
    whose = f", whose mean is {min(bases)}" if len(bases) == 1 else ""
    caption = f"Against {first}{whose}; of what both have."
    if any(gap.pairs and math.isnan(gap.over_pairs.low) for gap in shared.values()):
        caption += f" An interval over {what} takes {FEWEST_PAIRS} of them."
    if len(lines) > 1:
        caption += f" Of {len(lines)} comparisons one in twenty would be beyond noise by chance."
    left = len(compared) - len(shared)
    if left:
        caption += f" {left:,} more methods share no {what} or no seed with it, and cannot be compared."
    marked = frozenset(place for place, line in enumerate(lines) if line["verdict"].startswith(BEYOND))
    return table_of(f"{name}, against {first}", lines, caption)._replace(marked=marked)


def _ends(ends: Interval) -> str:
    return "-" if math.isnan(ends.low) else f"[{ends.low:+.3f}, {ends.high:+.3f}]"
