"""The answers that runs have written down, by prompt: predictions, and what tasks were answered.

Only files of answers to the server's prompts and to tasks' rows are read. A prediction over rows that belong to clients is
left out unless private rows were asked for.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedlight.judges.task_answers import last_moment
from fedlight.report import facts
from fedlight.report.parts import Answer
from fedlight.report.runs import Run
from fedlight.report.tables import number

REFERENCE = "reference"
Answers = dict[str, Answer]


class Asked(NamedTuple):
    """One set of prompts with what several methods answered.

    Attributes:
        title: which prompts.
        by_prompt: prompt -> method -> answer.
    """

    title: str
    by_prompt: dict[str, Answers]


def asked(runs: Sequence[Run]) -> list[Asked]:
    """All sets of prompts: of each task, and of predictions."""
    found: dict[str, dict[str, Answers]] = {}
    judged = verdicts(runs)
    for run in runs:
        for task in tasks(run):
            answers = task_answers(run, task, judged.get((*_place(run.folder), task), {}))
            _add(found.setdefault(f"Task {task}", {}), answers)
        if is_shown(run):
            _add(found.setdefault("Prompts of the server", {}), completions(run))
    return [Asked(title, by_prompt) for title, by_prompt in found.items() if by_prompt]


def _add(everything: dict[str, Answers], more: Mapping[str, Answers]) -> None:
    for prompt, answers in more.items():
        have = everything.setdefault(prompt, {})
        for method, answer in answers.items():
            have.setdefault(method, answer)  # of several seeds the first one's


def is_shown(run: Run) -> bool:
    """Whether the prompts of a prediction are nobody's own, or private ones were asked for."""
    return run.private or facts.within(run.config(), "data", "columns", "client") is None


def has_hidden(runs: Sequence[Run]) -> bool:
    """Whether a prediction over clients' rows was left out."""
    return any(not is_shown(run) and run.path("completions.jsonl") is not None for run in runs)


def completions(run: Run) -> dict[str, Answers]:
    """The first completion of each prompt; several completions are there to be labelled and show no method's answer.

    Returns:
        Prompt -> the run's method -> answer.
    """
    found: dict[str, Answers] = {}
    for row in run.jsonl("completions.jsonl"):
        texts = row.get("completions")
        fields = row.get("fields")
        prompt = _prompt(fields) if isinstance(fields, dict) else str(row.get("prompt", ""))
        if isinstance(texts, list) and len(texts) == 1 and prompt:
            found[prompt] = {run.method: Answer(run.method, str(texts[0]).strip())}
    return found


def _prompt(fields: Mapping[str, Any]) -> str:
    r"""The slots of a prompt; their names only where there are several.

    Example:
        >>> _prompt({"prompt": "Why?"}), _prompt({"instruction": "Add.", "input": "1, 2"})
        ('Why?', 'instruction: Add.\ninput: 1, 2')
    """
    texts = {name: str(text).strip() for name, text in fields.items() if str(text).strip()}
    if len(texts) == 1:
        return next(iter(texts.values()))
    return "\n".join(f"{name}: {text}" for name, text in texts.items())


def tasks(run: Run) -> list[str]:
    """The names of the tasks that a run has answered."""
    folder = run.path("tasks")
    return sorted({file.stem for file in folder.glob("*/*.jsonl")}) if folder else []


def verdicts(runs: Sequence[Run]) -> dict[tuple[str, str, str], dict[int, str]]:
    """What judges said: (folder above, folder of the run, task) -> row -> ``win``, ``tie`` or ``lose`` and against whom."""
    found: dict[tuple[str, str, str], dict[int, str]] = {}
    for run in runs:
        settings = run.settings()
        methods, against = settings.get("methods"), settings.get("against")
        if not isinstance(methods, dict) or run.path("verdicts.jsonl") is None:
            continue
        other = Path(str(against)).name if against else f"the {REFERENCE}"
        for row in run.jsonl("verdicts.jsonl"):
            folder, place = methods.get(str(row.get("method"))), row.get("row")
            if isinstance(folder, str) and isinstance(place, int) and "client" not in row:
                word = said(row.get("ours_first"), row.get("ours_second"))
                key = (*_place(Path(folder)), str(settings.get("task")))
                found.setdefault(key, {}).setdefault(place, f"{word} against {other}")
    return found


def said(first: float | None, second: float | None) -> str:
    """One word for the verdicts with our answer shown first and shown second.

    Example:
        >>> said(1.0, 1.0), said(1.0, 0.0), said(0.0, 0.5), said(None, 1.0)
        ('win', 'tie', 'lose', 'unread')
    """
    if first is None or second is None:
        return "unread"
    return "win" if first + second > 1 else "lose" if first + second < 1 else "tie"


def _place(folder: Path) -> tuple[str, str]:
    """Folder of the seed and of the stage: a recipe may have been moved since its settings were written."""
    return folder.parent.name, folder.name


def task_answers(run: Run, task: str, judged: Mapping[int, str]) -> dict[str, Answers]:
    """The last answers of a run to a task, with the right ones, and what a judge said of each row."""
    folder = run.folder / "tasks"
    found: dict[str, Answers] = {}
    for row in run.jsonl(f"tasks/{last_moment(folder, task)}/{task}.jsonl"):
        texts, prompt = row.get("answers"), str(row.get("prompt", "")).strip()
        if not isinstance(texts, list) or not prompt or prompt in found:
            continue
        target = str(row.get("target", "")).strip()
        score = number(row.get("score"))
        place = row.get("row")
        verdict = judged.get(place, "") if isinstance(place, int) else ""
        notes = ["" if score is None else f"score {score:g}", verdict]
        note = ", ".join(filter(None, notes))
        right = {REFERENCE: Answer(REFERENCE, target)} if target else {}
        text = str(texts[0]).strip() if texts else ""
        found[prompt] = {**right, run.method: Answer(run.method, text, note)}
    return found
