"""Comparison of two models' answers to the same prompts by a judge, each pair in both orders; a stage of recipes.

The answers are those of ``TaskScores``. A judge that asks an endpoint has a cache (`fedlight.judges.chat_judge`), so a
stopped stage asks nothing twice; its whole costs are logged and compared with its limits before it starts.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedlight.datamodules.preferences.labelling import labelled
from fedlight.datamodules.rows.rows import write_rows
from fedlight.evaluation.equal_length import Compared, rates_at_equal_length
from fedlight.evaluation.judge import BothPositions, Judge
from fedlight.evaluation.win_rate import outcomes, win_tie_lose
from fedlight.judges.task_answers import TaskAnswer, read_answers
from fedlight.support.results import cells, rich_text

REFERENCE = "reference"


def duels(
    methods: dict[str, str],
    judge: dict[str, Any],
    task: str,
    output: str,
    against: str | None = None,
    moment: str | None = None,
    in_both: bool = False,
    labels: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Count wins, ties and losses of each method's answers against another's, or against the right answers of the rows.

    The win rate is ``win + tie / 2``, with its 95 % interval by the bootstrap over prompts; the one at equal length is
    estimated by `fedlight.evaluation.equal_length`, and is not the length-controlled rate of AlpacaEval.

    Args:
        methods: method -> folder of a run with the callback ``TaskScores``. Of a run that scored its clients' own models,
            each client's answers are judged, and all of them count.
        judge: ``class_path`` and ``init_args`` of a judge, such as ``FactJudge``.
        task: name of the task.
        output: folder for ``verdicts.jsonl``, every pair with both its verdicts.
        against: folder of the run whose answers are the other side; None: the right answer of each row.
        moment: moment of the answers: ``epoch_3``, ``test`` and so on; None: the run's end.
        in_both: see `fedlight.evaluation.win_rate`.
        labels: method -> folder of the stage that labelled its pairs for DPO.

    Returns:
        ``rows`` with ``method``, the fields of `fedlight.evaluation.win_rate.WinTieLose`, ``at_equal_length``, and of
        methods in ``labels`` the numbers of pairs ``labelled`` and ``too_long`` for it; a ``report``.

    Raises:
        ValueError: there is no such judge; a folder has no such answers, or two have answers to different prompts; asking
            would pass a limit of the judge.
    """
    asked = BothPositions(made_judge(judge))
    theirs = None if against is None else read_answers(against, task, moment)
    pairs = {
        method: _paired(method, read_answers(folder, task, moment), theirs, against)
        for method, folder in methods.items()
    }
    # All pairs at once: the limits are checked before the first request.
    asked.announce(*_shown([pair for answered in pairs.values() for pair in answered]))
    rows, records, judged = [], [], {}
    for method, answered in pairs.items():
        fields, texts, others = _shown(answered)
        verdicts = asked.verdicts(fields, texts, others)
        prompts = [answer.row for answer, _ in answered]
        longer = [len(text.strip()) - len(other.strip()) for text, other in zip(texts, others, strict=True)]
        judged[method] = Compared(outcomes(*verdicts, in_both=in_both), longer, prompts)
        rows.append(
            {"method": method, **known(win_tie_lose(*verdicts, in_both=in_both, prompts=prompts)._asdict())}
        )
        records += [
            _record(method, answer, other, first, second)
            for (answer, other), first, second in zip(answered, *verdicts, strict=True)
        ]
    for row, rate in zip(rows, rates_at_equal_length(judged).values(), strict=True):
        row |= {} if math.isnan(rate.corrected) else {"at_equal_length": rate.corrected}
        row |= labelled(labels[row["method"]]) if labels and row["method"] in labels else {}
    write_rows(records, Path(output) / "verdicts.jsonl")
    title = f"{task}, against {REFERENCE if against is None else Path(against).name}"
    return {"rows": rows, "report": rich_text(title, *cells(rows))}


def made_judge(spec: dict[str, Any]) -> Judge:
    """Return the judge of a recipe's ``class_path`` and ``init_args``; ValueError where either does not exist.

    Examples:
        >>> made_judge({"class_path": "FactJudge", "init_args": {"seed": 3}}).seed
        3
    """
    from argparse import ArgumentError

    from fedlight.lightning_cli.cli import OneLineParser, find_by_name
    from fedlight.lightning_cli.parser_words import one_line

    find_by_name()  # class names without their modules
    parser = OneLineParser(exit_on_error=False)  # raise, do not end the process
    parser.add_argument("--judge", type=Judge, required=True)
    try:
        parsed = parser.parse_object({"judge": spec})
    except ArgumentError as error:
        raise ValueError(one_line(str(error))) from None
    made: Judge = parser.instantiate(parsed).judge
    return made


def known(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row without unknown values, because JSON has no NaN."""
    return {
        name: value for name, value in row.items() if not (isinstance(value, float) and math.isnan(value))
    }


def _paired(
    method: str, ours: Sequence[TaskAnswer], theirs: Sequence[TaskAnswer] | None, against: str | None
) -> list[tuple[TaskAnswer, str]]:
    """Return each answer with the other one to the same prompt, of the same client where clients' own models answered."""
    if theirs is None:
        return [(answer, answer.target) for answer in ours]
    by_client = any(answer.client is not None for answer in theirs)  # else one model answers for all
    others = {(answer.client, answer.row): answer for answer in theirs}
    keys = [(answer.client if by_client else None, answer.row) for answer in ours]
    if set(keys) != others.keys() or any(
        answer.prompt != others[key].prompt for answer, key in zip(ours, keys, strict=True)
    ):
        raise ValueError(
            f"{method} and {against} have answered different prompts: compare runs that were scored with the same task, its "
            "source, template, limit and seed; what clients' own models have answered can be `against` those of the same "
            "clients alone"
        )
    return [(answer, others[key].text) for answer, key in zip(ours, keys, strict=True)]


def _shown(pairs: Sequence[tuple[TaskAnswer, str]]) -> tuple[list[dict[str, str]], list[str], list[str]]:
    return (
        [
            {"prompt": answer.prompt, "target": answer.target, **answer.fields} for answer, _ in pairs
        ],  # slots win
        [answer.text for answer, _ in pairs],
        [other for _, other in pairs],
    )


def _record(method: str, answer: TaskAnswer, other: str, first: float, second: float) -> dict[str, Any]:
    return {
        "method": method,
        **({"client": answer.client} if answer.client is not None else {}),
        "row": answer.row,
        "ours": answer.text,
        "theirs": other,
        "ours_first": None if math.isnan(first) else first,  # JSON has no NaN
        "ours_second": None if math.isnan(second) else second,
    }
