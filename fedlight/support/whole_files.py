"""Files that are written whole or not at all: after a kill, on a full disk, and when the power goes.

Content goes to a file beside the target first, is synced to the disk, and replaces the target in one step. A killed process
leaves files named ``TARGET.<8 hex digits>.tmp``, which :func:`remove_unfinished` finds.
"""

import errno
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedlight.support.full_disk import full_disk_named

_UNFINISHED = re.compile(r".+\.[0-9a-f]{8}\.tmp")
_NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES}
"""Errors of file systems that cannot sync a folder; they order their writes in another way, or not at all."""


@contextmanager
def whole_file(file: Path, synced: bool = True) -> Iterator[Path]:
    """Yield a new path in the same folder, unique to this process, which replaces ``file`` if the block ends without error.

    Args:
        file: the target; its folder is made.
        synced: sync file and name to the disk; else :func:`sync` must be called before anything relies on them.

    Raises:
        OSError: it cannot be written; then ``file`` is as it was.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield new
        if synced:
            sync(new)
        os.replace(new, file)
        if synced:
            sync(file.parent)
    finally:
        new.unlink(missing_ok=True)


def write_whole(file: Path, content: str | bytes, synced: bool = True) -> None:
    """Write a file, all of it or nothing.

    Args:
        file: the target; its folder is made.
        content: bytes, or text, which is written as UTF-8.
        synced: as for :func:`whole_file`.

    Raises:
        OSError: it cannot be written; a full disk is named with the remedy.
    """
    data = content.encode() if isinstance(content, str) else content
    with full_disk_named(file), whole_file(file, synced) as new:
        new.write_bytes(data)


def sync(path: Path) -> None:
    """Sync a file, or the names in a folder, to the disk.

    Raises:
        OSError: the disk fails.
    """
    if path.is_dir() and os.name != "posix":  # elsewhere a folder cannot be opened
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if not path.is_dir() or error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(handle)


def remove_unfinished(folder: Path, but_below: str) -> int:
    """Remove unfinished files of killed processes, and return how many there were.

    Args:
        folder: folder in which no other process writes.
        but_below: name of a file that marks a sub-folder as another run's, which is left alone.
    """
    removed = 0
    for place, folders, files in os.walk(folder):
        if Path(place) != folder and but_below in files:
            folders.clear()
            continue
        for name in files:
            if _UNFINISHED.fullmatch(name):
                Path(place, name).unlink(missing_ok=True)
                removed += 1
    return removed
