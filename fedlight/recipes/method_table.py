"""Tables that compare methods by accuracy on clients' votes, win rates and bytes, or by scores in several settings.

They read folders of earlier stages.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from fedlight.datamodules.rows.rows import load_rows
from fedlight.evaluation.bootstrap import with_interval
from fedlight.evaluation.equal_length import Compared, rates_at_equal_length
from fedlight.federation.byzantine.liars import Liars
from fedlight.judges.rule_judges import OracleJudge
from fedlight.judges.selector_judge import SelectorJudge
from fedlight.runs.folders import versions
from fedlight.support.files import read_csv, result_of
from fedlight.support.results import at_chance, rich_text
from fedlight.support.types import Fields, Rows
from fedlight.toy.oracle import Oracle

Scores = Callable[[Sequence[Fields], Sequence[str], Sequence[str]], list[float]]
"""`Judge.verdicts`, or its mean over several judges."""

METRICS = {
    "accuracy": ("test/accuracy", "test/reward_accuracy"),
    "both_orders": ("test/accuracy_both_orders", "own/accuracy_both_orders"),
    "both_orders_low": ("test/accuracy_both_orders_low", "own/accuracy_both_orders_low"),
    "both_orders_high": ("test/accuracy_both_orders_high", "own/accuracy_both_orders_high"),
    "clients": ("test/client_mean",),
    "worst_tenth": ("test/client_worst_tenth",),
    "own": ("test/own_client_mean", "own/client_mean", "test/client_mean"),
    "own_worst_tenth": ("test/own_client_worst_tenth", "own/client_worst_tenth", "test/client_worst_tenth"),
    "own_spread": ("test/own_client_std", "own/client_std", "test/client_std"),
    "groups_ari": ("fed/group_ari",),
    "votes": ("test/votes",),
    "unjudged": ("test/votes_unjudged",),
    "labelled": ("label/pairs",),
    "too_long": ("label/too_long",),
}
"""Column -> names of metrics, of which the first that was logged is shown.

``both_orders`` is the accuracy with the two orders of a comparison averaged, and the ends of its interval; of clients' own
models where no other one is tested. ``votes`` counts the votes that a rule without training judges, ``unjudged`` those on
which it is silent: on comparisons with too few voters nobody knows how far voters agree. ``labelled`` counts the pairs
that selectors or a reward model have labelled for DPO, ``too_long`` those that did not fit into their limit.

``own`` is the accuracy of the model that a client itself would use: its group's selector, its own model, or the global one.
"""


def methods(
    methods: dict[str, dict[str, str]],
    judge: str | None = None,
    model: str = "toy",
    choice_template: str = "toy_choice",
    max_tokens: int = 128,
    oracle: dict[str, Any] | None = None,
    by_group: bool = False,
    judge_test: str | None = None,
    at_equal_length: bool = False,
) -> dict[str, Any]:
    """Return one row for each method.

    Args:
        methods: method -> folders of its stages, each of them optional: ``train``, ``test``, ``label`` and ``answers`` (with
            ``completions.jsonl``). Answers are compared with those of the method ``raw``.
        judge: adapter of a selector, or folder of several, that compares the answers by majority.
        model: base model of the judge.
        choice_template: template of the judge.
        max_tokens: most tokens of a pair shown to the judge.
        oracle: options of the embedded world, whose oracle compares the answers: by the mean taste of all clients
            (``win_rate``), and by each client's group, averaged over the clients (``win_rate_by_group``).
        by_group: also the win rate by each of these groups (``win_rate_GROUP``), and the lowest of them (``worst_group``).
        judge_test: folder of the stage that tested the judge. Where that is not shown to beat chance, ``win_rate`` is called
            ``win_rate_worthless``.
        at_equal_length: also ``win_rate_at_equal_length``, estimated by `fedlight.evaluation.equal_length`.

    Returns:
        ``rows`` with ``method``, the columns of ``METRICS``, win rates, each with the ends of its 95 % interval over prompts
        in ``NAME_low`` and ``NAME_high`` (none of raw answers against themselves, and of a single prompt), ``unread``:
        number of pairs too long for the selector ``judge``, which are left out, ``cut``: number of its inputs whose
        prompt was cut, if any, and ``sent_mib``: MiB sent down and up in training, including groupings.
    """
    answers = {
        name: load_rows(str(Path(stages["answers"]) / "completions.jsonl"))
        for name, stages in methods.items()
        if "answers" in stages
    }
    judges: dict[str, Scores] = {}
    if oracle is not None:
        judges |= _oracles(oracle, by_group)
    selector = None
    if judge is not None:
        selector = SelectorJudge(judge, model, choice_template=choice_template, max_tokens=max_tokens)
        is_worthless = judge_test is not None and at_chance([_metrics({"test": judge_test})])
        judges["win_rate_worthless" if is_worthless else "win_rate"] = selector.verdicts
    rows = []
    for name, stages in methods.items():
        row: dict[str, Any] = {"method": name, **_metrics(stages)}
        if name in answers:
            for column, scores in judges.items():
                row |= _compared(column, scores, answers[name], answers["raw"], at_equal_length)
            if selector is not None:
                row["unread"], selector.too_long = selector.too_long, 0  # counted for each method
                if selector.trimmed:
                    row["cut"], selector.trimmed = selector.trimmed, 0
            if by_group and oracle is not None:
                row["worst_group"] = min(row[f"win_rate_{group}"] for group in Oracle(**oracle).shares)
        if "train" in stages:
            row["sent_mib"] = sent_bytes(Path(stages["train"])) / 2**20
        rows.append(row)
    return {"rows": rows}


def settings_table(
    methods: dict[str, dict[str, str]] | list[dict[str, dict[str, str]]],
    score: list[str],
    of_rounds: dict[str, str] | None = None,
    unscored: list[str] | None = None,
) -> dict[str, Any]:
    """Return one row for each method that was run in several settings, such as alike and unlike clients.

    Args:
        methods: method -> name of a setting -> folder of its run; settings that a method cannot do are left out. Or a list
            of such maps, of several grids.
        score: metrics; the first that a run has logged is its score.
        of_rounds: name of a column -> metric that is logged with every round, such as ``fed/product_error``.
        unscored: methods whose score is none of what their clients use, as of FedSALoRA's global model.

    Returns:
        ``rows`` with ``method``; the score in each setting, under its name; ``NAME, SETTING`` of each of ``of_rounds``, mean
        over the rounds; ``kib_up`` and ``kib_down``, KiB of a visit, mean over the visits of all settings; ``epsilon``, the
        largest finite one that a run has logged.

    Raises:
        ValueError: a run that is to be scored has logged none of the metrics, or ``unscored`` names no method.
    """
    if isinstance(methods, list):
        methods = {method: runs for each in methods for method, runs in each.items()}
    if unknown := sorted(set(unscored or []) - set(methods)):
        raise ValueError(f"unscored has {unknown[0]!r}, which is no method: {', '.join(methods)}")
    rows = []
    for method, runs in methods.items():
        logged = {setting: result_of(folder)["metrics"] for setting, folder in runs.items()}
        row: dict[str, Any] = {"method": method}
        if method not in (unscored or []):
            row |= {setting: metric_of(folder, score) for setting, folder in runs.items()}
        for column, metric in (of_rounds or {}).items():
            values = {setting: _logged(Path(folder), metric).values() for setting, folder in runs.items()}
            row |= {f"{column}, {setting}": mean(numbers) for setting, numbers in values.items() if numbers}
        visits = [visit for folder in runs.values() for visit in read_csv(Path(folder, "visits.csv"))]
        for way in ("up", "down"):
            row[f"kib_{way}"] = mean(float(visit[f"bytes_{way}"]) for visit in visits) / 2**10
        names = [f"fed/epsilon{end}" for end in ("", "_local", "_sum", "_example")]
        spent = (metrics[name] for metrics in logged.values() for name in names if name in metrics)
        if finite := [epsilon for epsilon in spent if math.isfinite(epsilon)]:  # clipping alone has none
            row["epsilon"] = max(finite)
        rows.append(row)
    return {"rows": rows}


def liars_in_groups(runs: dict[str, str], liars: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return how far clients that lie gather at one selector of FedBiscuit, in each of several runs.

    Args:
        runs: name -> folder of a run with `GroupLog` and ``val/accuracy`` of votes that nobody has flipped.
        liars: name of a run -> settings of its `Liars`; of a run without liars they name the clients to compare with.

    Returns:
        ``rows`` of each run with ``method``, its name; ``liars``; ``together``, the share of the liars that are at the
        selector with most of them, at the last grouping; ``of_group``, their share of its clients; ``accuracy`` of the
        selectors' vote, ``accuracy_there`` of that selector, and ``accuracy_elsewhere``, mean of the others. A ``report``.

    Raises:
        ValueError: a run has no grouping, or no liars are given for it.
    """
    rows = []
    for name, folder in runs.items():
        groupings = read_csv(Path(folder, "groups.csv"))
        if not groupings or name not in liars:
            raise ValueError(f"{folder} has no groups.csv with a grouping, or liars has no {name!r}")
        last = max(int(row["round"]) for row in groupings)
        selectors = {row["client"]: row["selector"] for row in groupings if int(row["round"]) == last}
        lying = Liars(**liars[name]).among(selectors)
        if not lying:
            raise ValueError(f"liars of {name!r}: no liars among the clients, so there is nothing to gather")
        at = Counter(selectors[client] for client in lying)
        place, most = min(at.items(), key=lambda item: (-item[1], item[0]))
        logged = result_of(folder)["metrics"]
        of_selectors = {u: logged[f"val/accuracy_adapter{u}"] for u in sorted({*selectors.values()})}
        row: dict[str, Any] = {"method": name, "liars": len(lying), "together": most / len(lying)}
        row["of_group"] = most / Counter(selectors.values())[place]
        row |= {"accuracy": logged["val/accuracy"], "accuracy_there": of_selectors.pop(place)}
        # Without others, one selector has all clients.
        rows.append(row | {"accuracy_elsewhere": mean(of_selectors.values()) if of_selectors else math.nan})
    lines = [
        [str(value) if key in ("method", "liars") else f"{value:.3f}" for key, value in row.items()]
        for row in rows
    ]
    return {"rows": rows, "report": rich_text("liars in the groups of FedBiscuit", [*rows[0]], lines)}


def metric_of(folder: str | Path, names: Sequence[str]) -> float:
    """Return the first of some metrics that a stage has logged; raise ValueError where it has none of them."""
    logged: dict[str, float] = result_of(folder)["metrics"]
    for name in names:
        if name in logged:
            return logged[name]
    raise ValueError(f"{folder} has no metric {' or '.join(map(repr, names))}; it has {', '.join(logged)}")


def _oracles(options: dict[str, Any], by_group: bool) -> dict[str, Scores]:
    """Return scores by the mean taste of all clients, by that of each client's group, and of each group alone."""
    shares = Oracle(**options).shares
    groups = {group: OracleJudge(**options, group=group).verdicts for group in shares}

    def of_own_group(fields: Sequence[Fields], ours: Sequence[str], theirs: Sequence[str]) -> list[float]:
        scores = np.array([verdicts(fields, ours, theirs) for verdicts in groups.values()])  # [groups, pairs]
        mean: list[float] = (np.array([*shares.values()]) @ scores).tolist()  # [groups] @ [groups, pairs]
        return mean

    judges: dict[str, Scores] = {
        "win_rate": OracleJudge(**options).verdicts,
        "win_rate_by_group": of_own_group,
    }
    return judges | (
        {f"win_rate_{group}": verdicts for group, verdicts in groups.items()} if by_group else {}
    )


def _compared(
    column: str, scores: Scores, ours: Rows, raw: Rows, at_equal_length: bool = False
) -> dict[str, float]:
    """Return the win rate with its interval; without one where raw answers are compared with themselves."""
    texts, raw_texts = ([row["completions"][0] for row in rows] for rows in (ours, raw))
    scored = scores([row["fields"] for row in ours], texts, raw_texts)
    if ours is raw:  # every pair is a tie: no interval
        return {column: 0.5}
    read = [score for score in scored if not math.isnan(score)]
    row = with_interval(column, read) if read else {}
    if at_equal_length:
        longer = [
            len(text.strip()) - len(other.strip()) for text, other in zip(texts, raw_texts, strict=True)
        ]
        rates = rates_at_equal_length({column: Compared(scored, longer, range(len(scored)))})
        corrected = rates[column].corrected
        row |= {} if math.isnan(corrected) else {f"{column}_at_equal_length": corrected}
    return row


def _metrics(stages: Mapping[str, str]) -> dict[str, float]:
    logged: dict[str, float] = {}
    for stage in ("train", "test", "label"):  # later metrics replace earlier ones
        if stage in stages:
            logged |= result_of(stages[stage])["metrics"]
    columns = {
        column: [logged[name] for name in names if name in logged] for column, names in METRICS.items()
    }
    return {column: values[0] for column, values in columns.items() if values}


def sent_bytes(folder: Path) -> float:
    """Return the bytes sent down and up by the visits and groupings of a run's folder; 0 without ``visits.csv``."""
    if not (folder / "visits.csv").is_file():
        return 0.0
    visits = read_csv(folder / "visits.csv")
    sent = sum(float(row["bytes_down"]) + float(row["bytes_up"]) for row in visits)
    return sent + sum(sum(_logged(folder, f"fed/grouping_bytes_{way}").values()) for way in ("down", "up"))


def _logged(folder: Path, name: str) -> dict[str, float]:
    """Return epoch -> value of a metric; of a resumed run's files the later one counts."""
    rows = [row for file in versions(folder, "metrics.csv") for row in read_csv(file)]
    return {row["epoch"]: float(row[name]) for row in rows if row.get(name)}
