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
    if parsed.stage.command == "call":
        yield from _needs_of_call(parsed.config)
        if isinstance(parsed.stage.function, Requires):
            yield from parsed.stage.function.requires(parsed.config)
    for path, arguments in parts_of(parsed.config):
        kind = class_of(path)
        yield from _rows(arguments, parsed.stage.command, _task_columns(parsed.config, arguments))
        if isinstance(kind, Requires):
            yield from kind.requires({**_defaults(kind), **arguments})


def _defaults(kind: Any) -> dict[str, Any]:
    defaults = {name: parameter.default for name, parameter in inspect.signature(kind).parameters.items()}
    return {name: default for name, default in defaults.items() if default is not inspect.Parameter.empty}


def _needs_of_call(arguments: dict[str, Any]) -> Iterator[Need]:
    """Yield the needs of a function, whose arguments have the names of a datamodule's settings."""
    yield from _rows(arguments, "call", None)
    if isinstance(arguments.get("model"), str):
        yield Model(arguments["model"], False)
    encoder = arguments.get("encoder")
    if isinstance(encoder, str) and encoder != "hashed":
        yield Model(encoder, True)


def _rows(arguments: dict[str, Any], command: str, of_task: dict[str, str] | None) -> Iterator[RowSource]:
    if isinstance(arguments.get("split"), dict):
        of_data = arguments["split"]
        arguments = {**arguments, **of_data, "split": of_data.get("train_split")}
    source = arguments.get("source")
    columns = arguments.get("columns") if of_task is None else of_task
    is_task_rows = of_task is not None
    trains = command != "test" or is_task_rows
    if source and trains:
        yield from _each(source, arguments.get("split") or "train", columns)
    if arguments.get("test_source") and (command == "test" or "rows" in arguments):
        # Rows to test on need no client.
        of_test = {name: path for name, path in (columns or {}).items() if name not in ("client", "group")}
        yield from _each(arguments["test_source"], arguments.get("test_split") or "test", of_test)
    elif source and command == "test" and not is_task_rows:  # held out of the training rows
        yield from _each(source, arguments.get("split") or "train", columns)
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
        rows = [task.get(part) for part in ("data", "shots")]
        # By identity: the rows of two tasks may have equal settings.
        if any(isinstance(each, dict) and each.get("init_args") is arguments for each in rows):
            names = _names(path, task)
    where = {column: column for column in arguments.get("where") or {}}
    columns: dict[str, str] = dict(arguments.get("columns") or {})
    # A benchmark ignores the columns of names that it does not read.
    return {name: columns.get(name, name) for name in names or columns} | where


def _names(path: str, task: dict[str, Any]) -> tuple[str, ...]:
    """Return the names that a benchmark reads of each row."""
    kind, parts = class_of(path), ("data", "shots")
    if kind is None or not issubclass(kind, Task):
        return ()
    rows = {part: TaskRows(**task[part]["init_args"]) for part in parts if isinstance(task.get(part), dict)}
    # An object of the class, because the names may follow from the settings.
    return tuple(kind(**{**task, **rows}).names)
