"""Disk checks: is there room for downloads and results, and may the output folder be written?

Downloads, adapters with their checkpoints, merged models and written answers count: at most one text for each row, each of
the longest length that is allowed.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint

from fedlight.callbacks.scores.task_scores import TaskScores
from fedlight.evaluation.tasks.task import Task
from fedlight.lightning_cli.class_names import class_of
from fedlight.preflight.finding import Finding, ok, problem
from fedlight.preflight.machine import existing, free_bytes, size_text
from fedlight.preflight.memory import Training
from fedlight.preflight.stages import ParsedStage, arguments_of, settings_of
from fedlight.recipes.stages import Stage
from fedlight.recipes.steps import merge_adapter

COPIES = 2  # of a data set: as fetched, and as the package `datasets` maps it into memory
BYTES_PER_TOKEN = 5  # of written text
SCORED_PROMPT_TOKENS = 2048  # length of a benchmark's prompt where the datamodule has no ``max_tokens``

RowCounts = Mapping[tuple[str, str], int]  # (source, split) -> number of rows, as far as it is known


def check_output(folder: Path, stages: Sequence[Stage]) -> Finding:
    """Check that the output folder may be written and was made with these settings."""
    what = f"output {folder}"
    place = existing(folder)
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        return problem(what, f"{place} cannot be written: give another --output, or change its rights")
    for stage in stages:
        try:
            stage.refuse_other_settings()
        except ValueError as error:
            return problem(what, str(error))
    done = sum(stage.is_done for stage in stages)
    return ok(what, f"can be written; {done} of {len(stages)} stages are done" if done else "can be written")


def check_disk(
    stages: Sequence[ParsedStage],
    trainings: Sequence[Training],
    folder: Path,
    seeds: int,
    models: Mapping[str, int],
    rows: Mapping[str, int],
    counts: RowCounts,
) -> list[Finding]:
    """Check the room for downloads in the caches and for results of all seeds in the output folder.

    ``models`` and ``rows`` are bytes to be fetched, by the hub names of models and of data sets.
    """
    from huggingface_hub import constants

    written, uncounted = written_bytes(stages, trainings, counts)
    wanted = {folder: ("checkpoints, adapters and answers", seeds * written)}
    if models:
        wanted[Path(constants.HF_HUB_CACHE)] = ("models", sum(models.values()))
    if rows:
        import datasets  # takes half a second

        wanted[Path(datasets.config.HF_DATASETS_CACHE)] = ("data sets", COPIES * sum(rows.values()))
    findings = []
    disks = {place: existing(place).stat().st_dev for place in wanted}
    for place, (name, size) in wanted.items():
        # Folders on one disk share its room.
        together = sum(other for where, (_, other) in wanted.items() if disks[where] == disks[place])
        if not size and not (place == folder and uncounted):
            continue
        free = free_bytes(place)
        detail = f"about {size_text(size)} of {name}; {size_text(free)} are free"
        if place == folder and uncounted:
            detail += f"; not counted are answers to rows whose number is not known: {', '.join(uncounted)}"
        if together > free:
            remedy = "give another --output" if place == folder else "set HF_HOME"
            detail += f", of {size_text(together)} needed there in all: free some, or {remedy}"
        findings.append((problem if together > free else ok)(f"disk {place}", detail))
    return findings


def written_bytes(
    stages: Sequence[ParsedStage], trainings: Sequence[Training], counts: RowCounts
) -> tuple[int, list[str]]:
    """Return the bytes that one seed writes, and names of stages whose answers do not count, as their rows are not known."""
    by_model = {training.model: training for training in trainings}
    largest = max((training.at_rest.adapter_bytes for training in trainings), default=0)
    moments = max((training.at_rest.moment_bytes for training in trainings), default=0)
    total, uncounted = 0, []
    for parsed in stages:
        stage, config, _ = parsed
        if stage.is_done:
            continue
        answers = answers_bytes(parsed, counts)
        if answers is None:
            uncounted.append(stage.name)
        total += answers or 0
        if stage.command == "fit":
            adapters = settings_of(config, "model").get("num_adapters") or 1
            # save_top_k=-1 keeps all checkpoints; their number is not known, so none is counted.
            kept = sum(max(0, saver.get("save_top_k", 1)) for saver in arguments_of(config, ModelCheckpoint))
            # A checkpoint has the adapter and the moments of its optimizer.
            total += adapters * (largest + kept * (largest + moments))
        elif stage.calls(merge_adapter) and config.get("model") in by_model:
            # A merged model is as large as its base.
            total += by_model[config["model"]].at_rest.base_bytes
    return total, uncounted


def answers_bytes(parsed: ParsedStage, rows: RowCounts) -> int | None:
    """Return the bytes of the answers of ``predict`` or ``TaskScores``; None where the number of rows is not known."""
    if parsed.stage.command == "call":
        return 0
    parts = [_scored_bytes(scorer, parsed, rows) for scorer in arguments_of(parsed.config, TaskScores)]
    if parsed.stage.command == "predict":
        parts.append(_predicted_bytes(parsed.config, rows))
    return None if None in parts else sum(part or 0 for part in parts)


def _predicted_bytes(config: Mapping[str, Any], rows: RowCounts) -> int | None:
    model, data = settings_of(config, "model"), settings_of(config, "data")
    number = _num_rows(data, "train", data.get("limit"), rows)
    written = model.get("completions")
    written = written if isinstance(written, Mapping) else {}  # a user's module may have none
    tokens = written.get("number", 1) * written.get("max_new_tokens", 0) + (data.get("max_tokens") or 0)
    return None if number is None else number * tokens * BYTES_PER_TOKEN


def _scored_bytes(scorer: Mapping[str, Any], parsed: ParsedStage, rows: RowCounts) -> int | None:
    data = settings_of(parsed.config, "data")
    prompt = data.get("max_tokens") or SCORED_PROMPT_TOKENS
    total = 0
    for task in (scorer.get("tasks") or data.get("tasks") or {}).values():
        kind, settings = class_of(task["class_path"]), task.get("init_args") or {}
        number = _num_rows(settings_of(settings, "data"), "test", settings.get("limit"), rows)
        if number is None or kind is None or not issubclass(kind, Task):
            return None
        answer = settings.get("max_new_tokens") or kind.answer_tokens
        total += number * ((settings.get("samples") or 1) * answer + prompt) * BYTES_PER_TOKEN
    if parsed.stage.command != "fit":
        return total
    every, epochs = scorer.get("every_n_epochs"), parsed.config["trainer"].get("max_epochs") or 1
    # Rounded up, because the tasks are also done after the last epoch.
    return total * (bool(scorer.get("before_training")) + (-(-epochs // every) if every else 1))


def _num_rows(data: Mapping[str, Any], split: str, limit: int | None, rows: RowCounts) -> int | None:
    """Return the most rows that are read; ``limit`` bounds them."""
    known = rows.get((str(data.get("source")), data.get("split") or split))
    return min((number for number in (known, limit) if number is not None), default=None)
