"""Files that are there whole or not at all: after a kill, on a full disk, and when the power goes.

What is written goes to a file beside the target first, is brought to the disk, and takes the target's place in one step.
What a killed process leaves of that is named ``TARGET.<8 hex digits>.tmp`` and found by :func:`remove_unfinished`.
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
"""What file systems say that cannot bring a folder to the disk; they order their writes in another way, or not at all."""


@contextmanager
def whole_file(file: Path, synced: bool = True) -> Iterator[Path]:
    """A file to write to, which takes the place of ``file`` when the block ends without an error.

    Args:
        file: the target; its folder is made.
        synced: bring file and name to the disk; else :func:`sync` has to be called before anything relies on them.

    Yields:
        A path in the same folder, where nothing is yet. Two processes never get the same.

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
    """Writes a file, all of it or nothing.

    Args:
        file: the target; its folder is made.
        content: text is written as UTF-8.
        synced: as for :func:`whole_file`.

    Raises:
        OSError: it cannot be written; a full disk is named with the way on.
    """
    data = content.encode() if isinstance(content, str) else content
    with full_disk_named(file), whole_file(file, synced) as new:
        new.write_bytes(data)


def sync(path: Path) -> None:
    """Has the system bring a file, or the names in a folder, to the disk before anything else is done.

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
    """Removes what killed processes left of files that they were writing.

    Args:
        folder: nobody else may be writing in it.
        but_below: a folder further down that holds a file of this name belongs to another run, and is left alone.

    Returns:
        How many files were removed.
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
