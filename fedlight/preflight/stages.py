"""Parsing of every stage, its needs, and its reading of what earlier stages write. Nothing is loaded for it.

Does its config parse, and does its function take its arguments? Needs of rows follow from its settings, classes name
everything else. A stage writes into its own folder. Its settings name these files: the file of a callback, the folder of an
adapter or of checkpoints, an argument of a function. A path that it names in another stage's folder has to be among these.
"""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedlight.datamodules.rows.task_rows import TaskRows
from fedlight.evaluation.tasks.task import Task
from fedlight.lightning_cli.class_names import CLASS_FILES, class_of
from fedlight.lightning_cli.full_keys import values_in
from fedlight.preflight.finding import Finding, ok, problem
from fedlight.recipes.stages import Stage
from fedlight.runs.contents import is_output, texts_in
from fedlight.support.needs import KeepsLog, Model, Need, Requires, RowSource


class ParsedStage(NamedTuple):
    """A stage and its settings."""

    stage: Stage
    # all settings, defaults included, as plain values; the arguments of a function; empty where they do not parse
    config: dict[str, Any]
    namespace: Any = None  # the parser's form of the settings; None for a function


def parse_stages(stages: Sequence[Stage]) -> tuple[list[ParsedStage], list[Finding]]:
    """Return each stage with its settings, and one finding for each that does not parse, or else one for all."""
    parsed, wrong = [], []
    for stage in stages:
        try:
            settings = stage.check()
            if settings is None:
                parsed.append(ParsedStage(stage, dict(stage.arguments)))
            else:
                plain = {key: value for key, value in settings.as_dict().items() if key != "config"}
                parsed.append(ParsedStage(stage, plain, settings))
        except ValueError as error:
            parsed.append(ParsedStage(stage, {}))
            wrong.append(problem(f"stage {stage.name}", str(error)))
    functions = sum(stage.command == "call" for stage in stages)
    done = sum(stage.is_done for stage in stages)
    summary = f"{len(stages)} parse: {len(stages) - functions} commands, {functions} functions"
    return parsed, wrong or [ok("stages", summary + (f"; {done} are done already" if done else ""))]


def parts_of(value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every class that settings name, at any depth, with its arguments.

    Examples:
        >>> list(parts_of([{"class_path": "a.B", "init_args": {"c": {"class_path": "d.E"}}}]))
        [('a.B', {'c': {'class_path': 'd.E'}}), ('d.E', {})]
    """
    for _, part in values_in(value):
        if isinstance(part, dict) and isinstance(part.get("class_path"), str):
            yield part["class_path"], part.get("init_args") or {}


def settings_of(config: Mapping[str, Any], part: str) -> dict[str, Any]:
    """Return the arguments of the class under a key, such as ``data``; empty without a class, or where it takes none."""
    return (config.get(part) or {}).get("init_args") or {}


def arguments_of(config: Any, kind: type) -> Iterator[dict[str, Any]]:
    """Yield the arguments of every object of a class, or of a class derived from it, that settings name."""
    for path, arguments in parts_of(config):
        cls = class_of(path)
        if cls is not None and issubclass(cls, kind):
            yield arguments


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


class Written(NamedTuple):
    """Files that a stage writes."""

    paths: set[Path]  # files and folders that its settings name in its folder
    logs: set[str]  # names of the files that its callbacks write there without a setting
    epochs: int | None  # number of epochs; the last one is saved; None where the settings do not say


def check_references(stages: Sequence[ParsedStage], folders: Sequence[Path]) -> list[Finding]:
    """Return a finding for each path in the folders of one seed's runs that no stage writes, or else one for all."""
    known: dict[str, Written] = {}
    outputs: set[Path] = set()
    wrong, number = [], 0
    for stage, config, _ in stages:
        for key, path in _paths_elsewhere(stage.folder, config, folders):
            # `folder` and `path` of a function may be inputs; only `output` is surely written.
            is_read = stage.command == "call" and key in ("folder", "path")
            if is_output(key) and not is_read:
                outputs.add(path)
                continue
            if key in (config.get("if_run") or []) and path.name not in known:
                continue  # its stage is left out by a setting; the function expects that
            number += 1
            reason = _missing(path, folders, known, outputs)
            if reason is not None and not path.exists():
                wrong.append(problem(f"stage {stage.name}", f"{key}={path}: {reason}"))
        known[stage.name] = _written(stage.folder, config)
        # Settings that do not parse have a finding already: anything may be written there.
        if not config:
            outputs.add(stage.folder)
    files = f"{number} files and folders of earlier stages"
    return wrong or [ok("references", f"{files} are written before they are read")]


def _paths_elsewhere(home: Path, config: dict, folders: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """Yield the paths, with their keys, that settings name in folders of the run other than the stage's own."""
    for key, text in texts_in(config):
        path = Path(text)
        if text.startswith("/") and any(map(path.is_relative_to, folders)) and not path.is_relative_to(home):
            yield key, path


def _written(home: Path, config: dict) -> Written:
    paths = {Path(text) for _, text in texts_in(config) if Path(text).is_relative_to(home)}
    kinds: Iterator[Any] = (class_of(path) for path, _ in parts_of(config))
    logs = {kind.log_name for kind in kinds if isinstance(kind, KeepsLog)}
    # The folder itself, as trainer.default_root_dir, would count as writing every file below it.
    return Written(paths - {home}, logs, config.get("trainer", {}).get("max_epochs"))


def _missing(
    path: Path, folders: Sequence[Path], known: dict[str, Written], outputs: set[Path]
) -> str | None:
    """Return why nothing will lie at a path; None if a stage writes it."""
    if any(path == output or output in path.parents for output in outputs):
        return None
    folder = next(folder for folder in folders if path.is_relative_to(folder))
    name, *rest = path.relative_to(folder).parts or ("",)
    if name not in known:
        return f"no stage before it is called {name!r}; the stages before it are {', '.join(known) or 'none'}"
    written = known[name]
    if not rest or rest[-1] in written.logs or any(path in (file, *file.parents) for file in written.paths):
        return None
    if path.suffix == ".ckpt" and (epoch := re.fullmatch(r"epoch=(\d+)", path.stem)):
        if written.epochs is not None and int(epoch[1]) >= written.epochs:
            return f"stage {name} has max_epochs={written.epochs}, so its last checkpoint is epoch={written.epochs - 1}"
        return None
    if any(place in path.parents for place in written.paths):
        return None
    classes: dict[str, Any] = {name: class_of(name) for name in CLASS_FILES}
    logs = {kind.log_name: name for name, kind in classes.items() if isinstance(kind, KeepsLog)}
    remedy = "name this place in one of its settings, such as the folder of AdapterExport"
    if rest[-1] in logs:
        remedy = f"give it the callback {logs[rest[-1]]}"
    return f"stage {name} does not write it: {remedy}"
