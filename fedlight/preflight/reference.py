"""Checks that every stage reads what an earlier stage writes.

A stage writes into its own folder. Its settings name these files: the file of a callback, the folder of an
adapter or of checkpoints, an argument of a function. A path that it names in another stage's folder has to be among these.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedlight.lightning_cli.class_names import CLASS_FILES, class_of
from fedlight.preflight.command import ParsedStage, parts_of
from fedlight.preflight.finding import Finding, ok, problem
from fedlight.runs.contents import is_output, texts_in
from fedlight.support.needs import KeepsLog


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
