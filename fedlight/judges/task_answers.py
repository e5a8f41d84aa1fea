"""Reading of the answers that ``TaskScores`` has written into a run's folder."""

import re
from pathlib import Path
from typing import NamedTuple

from fedlight.datamodules.rows.rows import load_rows

OWN = "own"
"""Folder of the answers of the clients' own models."""


class TaskAnswer(NamedTuple):
    """Answer to one row of a task."""

    row: int  # number of the row in the source of the task
    prompt: str  # the prompt that the model read
    fields: dict[str, str]  # texts of the prompt's slots
    target: str  # the right answer
    text: str  # the model's first answer; empty if the prompt did not fit into the model
    client: str | None = None  # client whose own model answered; None: the one model of the run


def read_answers(folder: str, task: str, moment: str | None = None) -> list[TaskAnswer]:
    """Return the answers of one run to one task; ValueError where there are none.

    ``folder`` is the run's ``default_root_dir``, or that of a recipe's stage; ``moment`` is ``epoch_3``, ``test``,
    ``start``, ``validate`` or ``own``, by default the `last_moment`.
    """
    scores = Path(folder) / "tasks"
    file = scores / (moment or last_moment(scores, task)) / f"{task}.jsonl"
    if not file.is_file():
        raise ValueError(
            f"{file}: there is no such file: give the folder of a finished run with the callback TaskScores, one of its "
            "tasks, and a moment at which it was asked"
        )
    return [
        TaskAnswer(
            row["row"],
            row["prompt"],
            row.get("fields", {}),
            row["target"],
            next(iter(row["answers"]), ""),  # none where the prompt did not fit
            row.get("client"),
        )
        for row in load_rows(str(file))
    ]


def last_moment(scores: Path, task: str) -> str:
    """Return the moment whose answers represent a run, from the folder that ``TaskScores`` has written.

    It is the first of ``own``, ``test``, the last ``epoch_N``, ``validate`` and ``start`` that has answers to the task.
    """
    moments = [file.parent.name for file in scores.glob(f"*/{task}.jsonl")]
    # By number: epoch_10 sorts before epoch_9 by name.
    epochs = sorted(
        (name for name in moments if re.fullmatch(r"epoch_\d+", name)), key=lambda name: int(name[6:])
    )
    order = (OWN, "test", *reversed(epochs), "validate", "start")
    return next((name for name in order if name in moments), "test")
