"""Settings of a folder and contents of the local files that they name: a file that has changed counts as a changed setting.

A stage of a recipe and ``fedlight fit`` keep both in a file of their folder (`MadeWith`), before their first work.

Every text in the settings that is the path of a file or folder counts. Not counted are places for a stage's own files, by
the names of their settings (``output``, ``path``, ``folder``, ``..._folder``, ``cache`` and the like), results of earlier
stages of the same run, which their ``done.json`` describes, and hidden files and folders such as ``.git``.
"""

import hashlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlight.support.files import DONE, read_json, remedy_for, sealed, write_json

if TYPE_CHECKING:
    from fedlight.support.settings_record import Difference

OUTPUTS = ("output", "path", "folder", "dirpath", "cache")
OUTPUT_ENDINGS = ("_folder", "_dir", "_cache", "_path")
BARE_FOLDERS = ("source", "model", "tokenizer", "adapter", "encoder")
"""Settings, or ends of their names, whose value may be a folder's name without a slash."""

OWN_FILES = ("settings.json", DONE, "run.json", "fit.json", "run.lock")
OWN_FOLDERS = ("checkpoints", "clients", "metrics")
"""Folders of a stage that later stages do not read."""

TABLES = (".csv", ".jsonl", ".json")
"""File types that a report reads."""

TIMER_STEP_NS = 2 * 10**9
"""Time within which two changes of a file may get the same time stamp, on the coarsest file systems."""

CONTENTS = "contents of files"
EARLIER = "earlier files"
MISSING = "nothing"
MOST_NAMED = 5

Contents = dict[str, dict[str, Any]]


class MadeWith:
    """The settings of a folder, and the file that keeps them.

    Args:
        file: JSON file in the folder.
        settings: plain values, compared one by one.
        named: settings that may name local files.
        run: folder of the whole run; its finished stages describe their files themselves.
        remedy: what to do with a damaged file.
    """

    def __init__(
        self, file: Path, settings: dict[str, Any], named: dict[str, Any], run: Path, remedy: str
    ) -> None:
        self.file, self.settings = file, settings
        self._named, self._run, self._remedy = named, run, remedy

    def write(self, earlier: dict[str, str] | None = None) -> None:
        """Write the settings, the digests of the files that they name, and those of ``earlier`` files in the folder."""
        contents = contents_of(self._named, self.file.parent, self._run)
        others = {} if earlier is None else {EARLIER: earlier}
        write_json(self.file, sealed({**self.settings, CONTENTS: contents, **others}))

    def earlier(self) -> dict[str, str]:
        """Return the digests of files that were made with other settings, by their paths."""
        return dict(read_json(self.file, self._remedy).get(EARLIER, {}))

    def differences(self) -> list["Difference"]:
        """Return the settings that differ from those in the file; raise ValueError if it is damaged."""
        from fedlight.support.settings_record import differences  # it knows tensors, so it loads torch

        saved = read_json(self.file, self._remedy)
        names = dict.fromkeys(key for key in {**saved, **self.settings} if key not in (CONTENTS, EARLIER))
        was, now = ({key: side.get(key, MISSING) for key in names} for side in (saved, self.settings))
        return differences(was, now)

    def refuse_changed_files(self, everything: bool, remedy: str) -> None:
        """Raise ValueError for a named file with another content; ``everything``: also where size and time are unchanged."""
        contents: Contents = read_json(self.file, self._remedy).get(CONTENTS, {})
        if (name := changed(contents, everything)) is not None:
            raise ValueError(
                f"{self.file.parent} was made with another content of {name}, which has changed since: put the old one "
                f"back, {remedy}"
            )


def in_words(changes: Sequence["Difference"]) -> str:
    """Return differences in one line, each as ``key: old -> new``.

    Examples:
        >>> in_words([("model.lr", 0.1, 0.2), ("data.limit", None, 3)])
        'model.lr: 0.1 -> 0.2; data.limit: None -> 3'
    """
    named = "; ".join(f"{name}: {was} -> {now}" for name, was, now in changes[:MOST_NAMED])
    return named + (f"; and {len(changes) - MOST_NAMED} more" if len(changes) > MOST_NAMED else "")


def contents_of(settings: Any, stage: Path, run: Path) -> Contents:
    """Return digests of all files that settings name, but for those in ``stage`` and results of other stages of the ``run``.

    Returns:
        Text in the settings -> ``digest``, and ``unchanged_while``, a digest of sizes and times: while it stays the same the
        files need not be read again. It is None if the files changed too recently for their times to be reliable.
    """
    paths = {text: Path(text).expanduser().absolute() for text in sorted(local_paths(settings))}
    return {
        text: {"digest": digest_of(path), "unchanged_while": times_of(path)}
        for text, path in paths.items()
        if not path.is_relative_to(stage) and not stage.is_relative_to(path) and _stage_of(path, run) is None
    }


def local_paths(settings: Any) -> set[str]:
    """Return the texts in settings that name files or folders to read."""
    return {text for key, text in texts_in(settings) if not is_output(key) and _is_local(text, key)}


def is_output(key: str) -> bool:
    """Return whether a setting of this name is a place for a stage's own files."""
    last = key.rpartition(".")[2]
    return last in OUTPUTS or last.endswith(OUTPUT_ENDINGS)


def texts_in(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text and path in settings, at any depth, with the key that it stands under.

    Examples:
        >>> list(texts_in({"a": {"b": ["x", 1]}, "c": Path("y")}))
        [('b', 'x'), ('c', 'y')]
    """
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from texts_in(inner, str(name))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from texts_in(inner, key)
    elif isinstance(value, (str, Path)):
        yield key, str(value)


def _is_local(text: str, key: str) -> bool:
    if not text or len(text) > 1000 or "\n" in text or "\0" in text:  # a text of the data, no name of a file
        return False
    path = Path(text).expanduser()
    try:
        if path.is_file():
            return True
        # A word such as `test` may happen to be the name of a local folder.
        is_meant = os.sep in text or key.endswith(BARE_FOLDERS)
        return path.is_dir() and is_meant and text not in ("/", "./", "../")
    except OSError:
        return False


def changed(made_with: Contents, everything: bool) -> str | None:
    """Return the first file or folder whose content has changed; None if none has. Files that are gone do not count.

    Unless ``everything`` is set, files with unchanged size and time are not read again.
    """
    for text, was in made_with.items():
        path = Path(text).expanduser()
        # None: written too lately to tell by its time.
        same_times = was.get("unchanged_while") is not None and was["unchanged_while"] == times_of(path)
        if path.exists() and (everything or not same_times) and digest_of(path) != was.get("digest"):
            return text
    return None


def digest_of(path: Path) -> str:
    """Return a digest (32 hex digits) of a file's content, or of the names and contents of all files in a folder."""
    if path.is_file():
        return _file_digest(path.absolute(), *_signature(path))
    whole = hashlib.sha256()
    for file in files_below(path):
        # Names need not be UTF-8, and hold no zero.
        whole.update(f"{file.relative_to(path)}\0{digest_of(file)}\n".encode("utf-8", "surrogateescape"))
    return whole.hexdigest()[:32]


@lru_cache(maxsize=100_000)  # by size and time: a file that changes is read anew
def _file_digest(file: Path, size: int, time_ns: int) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:32]


def times_of(path: Path) -> str | None:
    """Return a digest of the sizes and times of all files; None if one changed too recently for its time to be reliable."""
    files = [path] if path.is_file() else files_below(path)
    signatures = [(str(file.relative_to(path)), *_signature(file)) for file in files]
    if any(time.time_ns() - time_ns < TIMER_STEP_NS for _, _, time_ns in signatures):
        return None
    return hashlib.sha256(repr(signatures).encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _signature(file: Path) -> tuple[int, int]:
    return (about := file.stat()).st_size, about.st_mtime_ns


def files_below(folder: Path) -> list[Path]:
    """Return all files below a folder in the order of their names, without hidden ones."""
    every = []
    for place, folders, files in os.walk(folder):
        # In place, so that os.walk does not enter the others.
        folders[:] = [name for name in folders if not name.startswith(".")]
        every += [Path(place, name) for name in files if not name.startswith(".")]
    return sorted(file for file in every if file.is_file())


def left_in(stage: Path) -> dict[str, str]:
    """Return digests of a stage's files for later stages, by their path in its folder."""
    files = {str(file.relative_to(stage)): file for file in files_below(stage)}
    return {
        name: digest_of(file)
        for name, file in files.items()
        # .tmp: unfinished, of a writer that was killed.
        if name not in OWN_FILES and Path(name).parts[0] not in OWN_FOLDERS and not name.endswith(".tmp")
    }


def tables_since(folder: Path, start_ns: int) -> dict[str, str]:
    """Return digests of the tables and texts in a folder whose time is not before ``start_ns``, by their path in it."""
    files = {str(file.relative_to(folder)): file for file in files_below(folder) if file.suffix in TABLES}
    return {
        name: digest_of(file)
        for name, file in files.items()
        if name not in OWN_FILES
        and Path(name).parts[0] not in ("checkpoints", "clients")
        and file.stat().st_mtime_ns >= start_ns
    }


def refuse_changed_results(settings: Any, run: Path) -> None:
    """Raise ValueError if a result of an earlier stage that settings name is gone or has changed since it was written."""
    named = {text for key, text in texts_in(settings) if not is_output(key)}
    for text in sorted(text for text in named if text.startswith(str(run))):
        path = Path(text)
        if (stage := _stage_of(path, run)) is None:
            continue
        for name, digest in read_json(stage / DONE, remedy_for(stage)).get("files", {}).items():
            file = stage / name
            if file.is_relative_to(path) and (not file.is_file() or digest_of(file) != digest):
                what = "is not what the stage wrote there" if file.is_file() else "is gone"
                raise ValueError(f"{file} {what}: {remedy_for(stage)}")


def _stage_of(path: Path, run: Path) -> Path | None:
    """Return the folder of the finished stage that a path in the run's folder belongs to."""
    folders = [folder for folder in (path, *path.parents) if folder.is_relative_to(run)]
    return next((folder for folder in folders if (folder / DONE).is_file()), None)
