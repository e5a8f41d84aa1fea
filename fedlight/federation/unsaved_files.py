"""Notes of files that no checkpoint names yet, or no longer: the next run removes the leftovers of a killed one.

Each process has its own note, ``MARK.unsaved``, and holds a lock on it as long as it lives. Lines are only added, so a kill
leaves a note that ends after a step:

=====================  ==============================================================================================
``NAME``               the file is about to be written
``{...}``              a checkpoint is about to be written: its path, that of this folder, a mark in it, the files that it
                       names, and those that are removed when it is written
``=MARK``              the checkpoint is written, and these files are removed
=====================  ==============================================================================================

Whether a checkpoint was written that was begun and not ended, the file itself shows: it contains its mark or not.
"""

import json
import re
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from fedlight.support.file_lock import FileLock
from fedlight.support.files import moved, read_text, sync

ENDING = ".unsaved"
_own: set[Path] = set()
"""Notes of this process, whose record locks do not keep the process itself out."""


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoint that is about to be written, at an absolute path or an address.

    Attributes:
        mark: text that is in this checkpoint and in no other.
        named: files that it names.
        obsolete: files that are removed when it is written.
    """

    path: str
    mark: str
    named: frozenset[str]
    obsolete: frozenset[str]

    @classmethod
    def from_line(cls, line: str, folder: Path) -> "Checkpoint | None":
        """Return the checkpoint of a line of a note in a folder; None for half a line, whose checkpoint was not begun."""
        try:
            note = json.loads(line)
            named, obsolete = (frozenset(map(str, note[key])) for key in ("named", "obsolete"))
            path = moved(str(note["path"]), Path(note.get("folder", folder)), folder)
            return cls(path, str(note["mark"]), named, obsolete)
        except (ValueError, KeyError, TypeError):
            return None

    def line(self, folder: Path) -> str:
        """Return the line of a note in a folder."""
        names = {"named": sorted(self.named), "obsolete": sorted(self.obsolete)}
        return json.dumps({"path": self.path, "folder": str(folder), "mark": self.mark, **names}) + "\n"

    def is_there(self) -> bool | None:
        """Return whether the file at its path is this checkpoint; None if that cannot be read."""
        file = Path(self.path)
        if "://" in self.path or file.is_dir():
            return None
        try:
            with zipfile.ZipFile(file) as parts:
                # torch.save pickles everything but the numbers of tensors into this entry.
                names = [name for name in parts.namelist() if name.rpartition("/")[2] == "data.pkl"]
                return any(self.mark.encode() in parts.read(name) for name in names) if names else None
        except FileNotFoundError:
            return False
        except Exception:  # of another form, or damaged
            return None


class UnsavedFiles:
    """Note of one process, whose files' names have its ``mark``; the note exists while there is something to note.

    The ``folder`` of the files must exist when the first name is noted.
    """

    def __init__(self, folder: Path, mark: str) -> None:
        self.folder = folder
        self._lock = FileLock(folder / f"{mark}{ENDING}")
        self._names: set[str] = set()
        self._is_held = False

    def add(self, name: str) -> None:
        """Note a file that is about to be written."""
        self._append(f"{name}\n")
        self._names.add(name)

    def forget(self, name: str) -> None:
        """Stop to keep a removed file in mind; its line in the note does no harm."""
        self._names.discard(name)

    def begin(self, checkpoint: Checkpoint) -> None:
        """Sync the files that a checkpoint names, and note the checkpoint before it is written."""
        unsaved = self._names & checkpoint.named
        if not unsaved and not checkpoint.obsolete:
            return
        for name in unsaved:
            if (self.folder / name).exists():
                sync(self.folder / name)
        self._append(checkpoint.line(self.folder), synced=True)
        sync(self.folder)

    def end(self, checkpoint: Checkpoint) -> None:
        """Drop the files that a written checkpoint names, and those that were removed with it."""
        if not self._is_held:
            return
        self._names = {name for name in self._names - checkpoint.named if (self.folder / name).exists()}
        if self._names:
            self._append(f"={checkpoint.mark}\n")
            return
        self.drop()

    def drop(self) -> None:
        """Give up the note: the files are named by a checkpoint, or in the note of another process."""
        self._names.clear()
        if self._is_held:
            self._is_held = False
            _own.discard(self._lock.file)
            self._lock.give_back()

    def _append(self, line: str, synced: bool = False) -> None:
        if not self._is_held:
            while not self._lock.take():
                time.sleep(0.01)  # a run that opens the folder looks at the new note
            _own.add(self._lock.file)
            self._is_held = True
        self._lock.append(line, synced)


def remove_unsaved(folder: Path, names: "re.Pattern[str]") -> int:
    """Remove the needless files that ended processes have noted, and return how many there were.

    Files whose names do not match ``names`` stay, whatever a note says.
    """
    removed = 0
    for note in folder.glob(f"*{ENDING}"):
        lock = FileLock(note)
        if note in _own or not lock.take():  # its process runs
            continue
        if lock.supported:
            for name in _needless(read_text(note, errors="replace"), folder):
                if names.fullmatch(name):
                    for file in (folder / name, *folder.glob(f"{name}.*.tmp")):  # a kill leaves half a file
                        removed += file.exists()
                        file.unlink(missing_ok=True)
        lock.give_back(remove=lock.supported)
    return removed


def _needless(note: str, folder: Path) -> set[str]:
    """Return the files of a note in a folder that no checkpoint names."""
    unsaved: set[str] = set()
    begun: dict[str, Checkpoint] = {}
    lines = note.splitlines()
    for number, line in enumerate(lines, 1):
        if line.startswith("{"):
            checkpoint = Checkpoint.from_line(line, folder)
            if checkpoint is not None:
                begun[checkpoint.mark] = checkpoint
            elif number < len(lines):  # no kill leaves such a line, so the needed files are unknown
                return set()
        elif line.startswith("="):
            if (ended := begun.pop(line[1:], None)) is not None:
                unsaved -= ended.named
        else:
            unsaved.add(line)
    for checkpoint in begun.values():
        is_there = checkpoint.is_there()
        if is_there is not False:  # unknown, as for a remote one: its files stay
            unsaved -= checkpoint.named
        if is_there:
            unsaved |= checkpoint.obsolete
    return unsaved
