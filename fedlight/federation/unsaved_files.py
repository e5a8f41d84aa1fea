"""Files that no checkpoint names yet, noted beside them, so that what a killed process wrote in vain can be removed.

Each process has a note of its own, ``MARK.unsaved``, and holds a lock on it as long as it lives. A name is noted before its
file is written and struck out before a checkpoint that names it is. So a note that nobody holds tells of files which no
checkpoint can name. A process that is killed between striking out and the end of the checkpoint leaves its files.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from fedlight.federation.file_lock import FileLock
from fedlight.federation.whole_files import sync

ENDING = ".unsaved"
_own: set[Path] = set()
"""Notes of this process, on which its own locks do not keep it from taking them again."""


class UnsavedFiles:
    """The note of one process, there while there is something to be noted.

    Args:
        folder: of the files; it has to be there when the first name is noted.
        mark: of the process, a part of its files' names.
    """

    def __init__(self, folder: Path, mark: str) -> None:
        self.folder = folder
        self._lock = FileLock(folder / f"{mark}{ENDING}")
        self._names: set[str] = set()

    def add(self, name: str) -> None:
        """Notes a file that is about to be written."""
        if not self._names:
            self._lock.take()
            _own.add(self._lock.file)
        self._names.add(name)
        self._lock.append(f"{name}\n")

    def saved(self, names: Iterable[str]) -> None:
        """Brings files to the disk and strikes them out, before a checkpoint names them."""
        now_saved = self._names.intersection(names)
        if not now_saved:
            return
        for name in now_saved:
            if (self.folder / name).exists():
                sync(self.folder / name)
        self._names = {name for name in self._names - now_saved if (self.folder / name).exists()}
        if self._names:
            self._lock.write("".join(f"{name}\n" for name in sorted(self._names)))
        else:
            _own.discard(self._lock.file)
            self._lock.give_back()
        sync(self.folder)


def remove_unsaved(folder: Path, names: "re.Pattern[str]") -> int:
    """Removes what processes that are gone have noted.

    Args:
        folder: of the files.
        names: that such a file may have; others are left alone, whatever a note says.

    Returns:
        How many files were removed.
    """
    removed = 0
    for note in folder.glob(f"*{ENDING}"):
        lock = FileLock(note)
        if note in _own or not lock.take():
            continue
        if lock.supported:
            for name in note.read_text(encoding="utf-8", errors="replace").splitlines():
                if names.fullmatch(name):
                    for file in (folder / name, *folder.glob(f"{name}.*.tmp")):
                        removed += file.exists()
                        file.unlink(missing_ok=True)
        lock.give_back(remove=lock.supported)
    return removed
