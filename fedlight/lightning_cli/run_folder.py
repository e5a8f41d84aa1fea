"""Lock of a run's folder: one command at a time writes there; the next one removes the unfinished files of killed ones."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedlight.support.file_lock import FileLock, holder, this_process
from fedlight.support.files import refuse_unwritable, remove_unfinished

LOCK = "run.lock"


@contextmanager
def alone_in(folder: Path, setting: str) -> Iterator[None]:
    """Keep other commands out of a folder, which is created if missing and named by a ``setting``, while the block runs.

    Raises ValueError where another process is at work there, OSError where nothing can be written.
    """
    refuse_unwritable(folder, setting)
    lock = FileLock(folder / LOCK)
    if not lock.take(this_process()):
        raise ValueError(
            f"{folder} is in use by {holder(lock.file)}: wait for its end or end it, or give another {setting}"
        )
    if not lock.supported:
        print(f"the file system of {folder} has no locks: no other command may work there", file=sys.stderr)
    try:
        if lock.supported:
            # Without a lock these files may be those of a command at work.
            remove_unfinished(folder, but_below=LOCK)
        yield
    finally:
        lock.give_back()
