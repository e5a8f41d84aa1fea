"""Sample answers: the same prompts before several methods, side by side.

Predictions over clients' own rows are left out unless private rows were asked for.
"""

from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path
from typing import Any

from fedlight.evaluation.win_rate import outcomes
from fedlight.judges.task_answers import last_moment
from fedlight.report.parts import Answer, Part, Section, Texts
from fedlight.runs import facts
from fedlight.runs.run import Run
from fedlight.support.words import number

REFERENCE = "reference"
RAW = "raw model"
SAMPLES = "samples.jsonl"
LONGEST = 3000  # characters of a text on the page
OUTCOMES = {1.0: "win", 0.5: "tie", 0.0: "lose"}  # else a verdict could not be read
MOST_PROMPTS = 20
MOST_SETS = 6

Answers = dict[str, Answer]
Prompts = dict[str, Answers]
"""Prompt -> method -> answer."""


def section(runs: Sequence[Run]) -> Section | None:
    """Return the section: at most twenty prompts, shared out among the sets of prompts."""
    sets = asked(runs)
    note = "A prediction over clients' own rows is not shown: --private shows it."
    hidden = [run for run in runs if not is_shown(run)]
    is_left_out = any(run.path("completions.jsonl") or run.path(SAMPLES) for run in hidden)
    notes: tuple[str, ...] = (note,) if is_left_out else ()
    if not sets:
        return Section("answers", "Sample answers", "", [], notes) if notes else None
    shown = sets[:MOST_SETS]
    parts: list[Part] = [_texts(*prompts, max(1, MOST_PROMPTS // len(shown))) for prompts in shown]
    if len(shown) < len(sets):
        notes += (f"{len(shown)} of {len(sets)} sets of prompts are shown.",)
    return Section("answers", "Sample answers", "The same prompts, answered by each method.", parts, notes)


def _texts(title: str, by_prompt: Prompts, most: int) -> Texts:
    order = [method for answers in by_prompt.values() for method in answers]
    # Stable: the reference first, then as they come.
    methods = sorted(dict.fromkeys(order), key=lambda method: method != REFERENCE)
    examples = []
    for prompt in choose(by_prompt, most):
        answers = [by_prompt[prompt][method] for method in methods if method in by_prompt[prompt]]
        shown = [answer._replace(text=_cut(answer.text) or "(empty)") for answer in answers]
        examples.append((_cut(prompt), shown))
    count = f"{len(examples)} of {len(by_prompt):,} prompts"
    return Texts(title, examples, f"{count}, spread evenly over those that most methods have answered.")


def choose(by_prompt: dict[str, Answers], most: int) -> list[str]:
    """Choose, of the prompts that most methods have answered, some at equal distances, so that no choice is involved.

    Examples:
        >>> two, one = {"a": Answer("a", ""), "b": Answer("b", "")}, {"a": Answer("a", "")}
        >>> choose({"p": one, "q": two, "r": two, "s": two}, 2)
        ['q', 's']
    """
    answered = max(len(answers) for answers in by_prompt.values())
    best = [prompt for prompt, answers in by_prompt.items() if len(answers) == answered]
    if len(best) <= most:
        return best
    return [best[round(place * (len(best) - 1) / max(1, most - 1))] for place in range(most)]


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text):,} characters)"


def asked(runs: Sequence[Run]) -> list[tuple[str, Prompts]]:
    """Return all sets of prompts, each with its title: of each task, and of predictions."""
    sets: dict[str, Prompts] = {}
    judged = verdicts(runs)
    for run in runs:
        of_run = {
            f"Task {t}": task_answers(run, t, judged.get((*_place(run.folder), t), {})) for t in tasks(run)
        }
        if is_shown(run):
            of_run |= {"Before and after training": samples(run), "Prompts of the server": completions(run)}
        for title, by_prompt in of_run.items():
            for prompt, answers in by_prompt.items():
                have = sets.setdefault(title, {}).setdefault(prompt, {})
                have |= answers | have  # of several seeds the first one's
    return [*sets.items()]


def is_shown(run: Run) -> bool:
    """Tell whether a prediction's prompts belong to no client, or private ones were asked for."""
    return run.private or facts.within(run.config(), "data", "columns", "client") is None


def completions(run: Run) -> dict[str, Answers]:
    """Return prompt -> the run's method -> its single completion; several completions await labels and are no answer."""
    by_prompt: dict[str, Answers] = {}
    for row in run.jsonl("completions.jsonl"):
        texts, fields = row.get("completions"), row.get("fields")
        prompt = _prompt(fields) if isinstance(fields, dict) else str(row.get("prompt", ""))
        if isinstance(texts, list) and len(texts) == 1 and prompt:
            by_prompt[prompt] = {run.method: Answer(run.method, str(texts[0]).strip())}
    return by_prompt


def samples(run: Run) -> dict[str, Answers]:
    """Return prompt -> the reference, the raw model's answer and that of the run, as ``SampleAnswers`` writes them."""
    names = {"reference": REFERENCE, "raw": RAW, "tuned": run.method}
    return {
        row["prompt"].strip(): {name: Answer(name, row[key].strip()) for key, name in names.items()}
        for row in run.jsonl(SAMPLES)
        if all(isinstance(row.get(key), str) for key in ("prompt", *names))
    }


def _prompt(fields: Mapping[str, Any]) -> str:
    r"""Return the slots of a prompt as text, with their names where there are several.

    Examples:
        >>> _prompt({"prompt": "Why?"}), _prompt({"instruction": "Add.", "input": "1, 2"})
        ('Why?', 'instruction: Add.\ninput: 1, 2')
    """
    texts = {name: str(text).strip() for name, text in fields.items() if str(text).strip()}
    return "\n".join(f"{name}: {text}" if len(texts) > 1 else text for name, text in texts.items())


def tasks(run: Run) -> list[str]:
    """Return the names of the tasks that a run has answered."""
    folder = run.path("tasks")
    return sorted({file.stem for file in folder.glob("*/*.jsonl")}) if folder else []


def task_rows(run: Run, task: str) -> list[dict[str, Any]]:
    """Return the rows of a run's last answers to a task."""
    return run.jsonl(f"tasks/{last_moment(run.folder / 'tasks', task)}/{task}.jsonl")


def scored_rows(run: Run, task: str) -> list[tuple[dict[str, Any], float]]:
    """Return the rows of `task_rows` that have a score, with it."""
    scores = ((row, number(row.get("score"))) for row in task_rows(run, task))
    return [(row, score) for row, score in scores if score is not None]


def verdicts(runs: Sequence[Run]) -> dict[tuple[str, str, str], dict[int, str]]:
    """Return judges' verdicts: (parent folder, folder of the run, task) -> row -> verdict, and against whom."""
    by_run: dict[tuple[str, str, str], dict[int, str]] = {}
    for run in runs:
        settings = run.settings()
        methods, against = settings.get("methods"), settings.get("against")
        if not isinstance(methods, dict) or run.path("verdicts.jsonl") is None:
            continue
        other = Path(str(against)).name if against else f"the {REFERENCE}"
        for row in run.jsonl("verdicts.jsonl"):
            folder, place = methods.get(str(row.get("method"))), row.get("row")
            # A row with a client is about that client's own model.
            if isinstance(folder, str) and isinstance(place, int) and "client" not in row:
                (outcome,) = outcomes([row.get("ours_first", nan)], [row.get("ours_second", nan)])
                word = OUTCOMES.get(outcome, "unread")
                key = (*_place(Path(folder)), str(settings.get("task")))
                by_run.setdefault(key, {}).setdefault(place, f"{word} against {other}")
    return by_run


def _place(folder: Path) -> tuple[str, str]:
    """Return the names of the seed's and the stage's folder, which stay when a recipe is moved."""
    return folder.parent.name, folder.name


def task_answers(run: Run, task: str, judged: Mapping[int, str]) -> dict[str, Answers]:
    """Return the last answers of a run to a task, with the targets and a judge's verdict on each row."""
    by_prompt: dict[str, Answers] = {}
    for row in task_rows(run, task):
        texts, prompt = row.get("answers"), str(row.get("prompt", "")).strip()
        if not isinstance(texts, list) or not prompt or prompt in by_prompt:
            continue
        target, score, place = str(row.get("target", "")).strip(), number(row.get("score")), row.get("row")
        verdict = judged.get(place, "") if isinstance(place, int) else ""
        note = ", ".join(filter(None, ["" if score is None else f"score {score:g}", verdict]))
        right = {REFERENCE: Answer(REFERENCE, target)} if target else {}
        text = str(texts[0]).strip() if texts else ""
        by_prompt[prompt] = {**right, run.method: Answer(run.method, text, note)}
    return by_prompt
