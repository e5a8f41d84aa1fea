"""Needs of a recipe's stages: rows follow from their settings, classes name everything else."""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from fedlight.datamodules.rows.task_rows import TaskRows
from fedlight.evaluation.tasks.task import Task
from fedlight.lightning_cli.class_names import class_of
from fedlight.preflight.command import ParsedStage, parts_of
from fedlight.support.needs import Model, Need, Requires, RowSource


def needs(stages: Sequence[ParsedStage]) -> dict[Need, list[str]]:
    """Return each need once, with the names of its stages; a stage that is done needs nothing."""
    stage_names: dict[Need, list[str]] = {}
    for parsed in stages:
        for need in [] if parsed.stage.is_done else dict.fromkeys(_needs_of(parsed)):
            stage_names.setdefault(need, []).append(parsed.stage.name)
    return stage_names


def _needs_of(parsed: ParsedStage) -> Iterator[Need]:
    if parsed.stage.command == "call":  # its arguments have the names of a datamodule's settings
        yield from _rows(parsed.config, "call", None)
        if isinstance(parsed.config.get("model"), str):
            yield Model(parsed.config["model"], False)
        encoder = parsed.config.get("encoder")
        if isinstance(encoder, str) and encoder != "hashed":
            yield Model(encoder, True)
        if isinstance(parsed.stage.function, Requires):
            yield from parsed.stage.function.requires(parsed.config)
    for path, arguments in parts_of(parsed.config):
        kind = class_of(path)
        yield from _rows(arguments, parsed.stage.command, _task_columns(parsed.config, arguments))
        if isinstance(kind, Requires):
            parameters = inspect.signature(kind).parameters.items()
            defaults = {name: given.default for name, given in parameters if given.default is not given.empty}
            yield from kind.requires({**defaults, **arguments})


def _rows(arguments: dict[str, Any], command: str, of_task: dict[str, str] | None) -> Iterator[RowSource]:
    if isinstance(arguments.get("split"), dict):
        of_data = arguments["split"]
        arguments = {**arguments, **of_data, "split": of_data.get("train_split")}
    source = arguments.get("source")
    columns = arguments.get("columns") if of_task is None else of_task
    # Without rows of their own, tests are held out of the training rows.
    trains = command != "test" or of_task is not None or not arguments.get("test_source")
    if source and trains:
        yield from _each(source, arguments.get("split") or "train", columns)
    if arguments.get("test_source") and (command == "test" or "rows" in arguments):
        # Rows to test on need no client.
        of_test = {name: path for name, path in (columns or {}).items() if name not in ("client", "group")}
        yield from _each(arguments["test_source"], arguments.get("test_split") or "test", of_test)
    if arguments.get("public_source"):
        public = arguments.get("public_columns") or columns
        yield from _each(arguments["public_source"], arguments.get("public_split") or "train", public)


def _each(source: Any, split: str, columns: Any) -> Iterator[RowSource]:
    sources = [source] if isinstance(source, str) else list(source)
    maps = list(columns) if isinstance(columns, (list, tuple)) else [columns] * len(sources)
    for origin, mapped in zip(sources, maps, strict=False):
        named = {str(name): path for name, path in (mapped or {}).items() if path}
        yield RowSource(str(origin), split, tuple(sorted(named.items())))


def _task_columns(config: Any, arguments: dict[str, Any]) -> dict[str, str] | None:
    """Return the columns of a benchmark's rows by the names that its class reads; None for other rows."""
    if not {"share", "where"} <= set(arguments):
        return None
    names: tuple[str, ...] = ()
    for path, task in parts_of(config):
        kind = class_of(path)
        rows = {part: task[part] for part in ("data", "shots") if isinstance(task.get(part), dict)}
        # By identity: the rows of two tasks may have equal settings.
        is_ours = any(each.get("init_args") is arguments for each in rows.values())
        if is_ours and kind is not None and issubclass(kind, Task):
            # An object of the class, because the names may follow from the settings.
            of_rows = {part: TaskRows(**each["init_args"]) for part, each in rows.items()}
            names = tuple(kind(**{**task, **of_rows}).names)
    where = {column: column for column in arguments.get("where") or {}}
    columns: dict[str, str] = dict(arguments.get("columns") or {})
    # A benchmark ignores the columns of names that it does not read.
    return {name: columns.get(name, name) for name in names or columns} | where
