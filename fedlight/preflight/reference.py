"""Does every stage read what a stage before it writes?

A stage's folder is its own. What it writes there follows from its settings: a callback's file, the folder of an adapter or
of checkpoints, an argument of a function. What it names in the folder of another has to be among these.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fedlight.chosen_stages import OUTPUTS
from fedlight.preflight.command import Read, parts_of, paths_of
from fedlight.preflight.finding import Finding, ok, problem

LOGS = {"visits.csv": "VisitLog", "groups.csv": "GroupLog", "clients.csv": "ClientAccuracy"}
"""What callbacks write beside a run without being told where."""


class Written(NamedTuple):
    """What a stage leaves: files and folders, those callbacks' logs, and the last epoch that it saves."""

    paths: set[Path]
    callbacks: set[str]
    epochs: int | None


def check_references(reads: Sequence[Read], folders: Sequence[Path]) -> list[Finding]:
    """Checks the stages of one seed in their order.

    Args:
        reads: all stages with their settings.
        folders: of the seed's stages; nothing else is looked at.

    Returns:
        A finding for each reference to nothing, or else one for all.
    """
    known: dict[str, Written] = {}
    outputs: set[Path] = set()
    wrong, number = [], 0
    for read in reads:
        for key, path in _inside(read, folders):
            if key in OUTPUTS and not _is_read(read, key):
                outputs.add(path)
                continue
            number += 1
            reason = _missing(path, folders, known, outputs)
            if reason is not None and not path.exists():
                wrong.append(problem(f"stage {read.stage.name}", f"{key}={path}: {reason}"))
        known[read.stage.name] = _written(read)
        if not read.config:  # its settings do not parse, which is said already: anything may lie there
            outputs.add(read.stage.folder)
    return wrong or [
        ok("references", f"{number} files and folders of earlier stages are written before they are read")
    ]


def _is_read(read: Read, key: str) -> bool:
    """A function's ``results`` or ``folder`` may be what it compares; only ``output`` is surely its own."""
    return read.stage.command == "call" and key in ("results", "folder", "path")


def _inside(read: Read, folders: Sequence[Path]) -> list[tuple[str, Path]]:
    """What the settings name in folders of the run other than the stage's own."""
    named = [(key, Path(text)) for key, text in paths_of(read.config) if text.startswith("/")]
    return [
        (key, path)
        for key, path in named
        if any(path.is_relative_to(folder) for folder in folders)
        and not path.is_relative_to(read.stage.folder)
    ]


def _written(read: Read) -> Written:
    own = {Path(text) for _, text in paths_of(read.config) if Path(text).is_relative_to(read.stage.folder)}
    names = {path.rpartition(".")[2] for path, _ in parts_of(read.config)}
    return Written(own - {read.stage.folder}, names, read.config.get("trainer", {}).get("max_epochs"))


def _missing(
    path: Path, folders: Sequence[Path], known: dict[str, Written], outputs: set[Path]
) -> str | None:
    """Why nothing will lie there; None if something will."""
    if any(path == output or output in path.parents for output in outputs):
        return None
    folder = next(folder for folder in folders if path.is_relative_to(folder))
    name, *rest = path.relative_to(folder).parts or ("",)
    if name not in known:
        return f"no stage before it is called {name!r}; the stages before it are {', '.join(known) or 'none'}"
    written = known[name]
    if not rest or any(path == own or path in own.parents for own in written.paths):
        return None
    if rest == ["adapter"] and "AdapterExport" not in written.callbacks:
        return f"stage {name} exports no adapter: give it the callback AdapterExport"
    if path.suffix == ".ckpt" and (found := re.fullmatch(r"epoch=(\d+)", path.stem)):
        if written.epochs is not None and int(found[1]) >= written.epochs:
            return f"stage {name} has max_epochs={written.epochs}, so its last checkpoint is epoch={written.epochs - 1}"
        return None
    callback = LOGS.get(rest[-1])
    if callback is not None and callback not in written.callbacks:
        return f"stage {name} does not write it: give it the callback {callback}"
    if callback is not None or any(own in path.parents for own in written.paths):
        return None
    return f"stage {name} does not write it"
