"""One command at a time in a run's folder: a second one says who is there, and ends.

What killed commands left of files that they were writing is removed by the next one, as it is alone then.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedlight.support.file_lock import FileLock, holder, this_process
from fedlight.support.files import refuse_unwritable, remove_unfinished

LOCK = "run.lock"


@contextmanager
def alone_in(folder: Path, setting: str) -> Iterator[None]:
    """Keeps other commands out of a folder while its block runs.

    Args:
        folder: made where it is missing.
        setting: what to give another value to work beside the other command, ``--output``.

    Raises:
        ValueError: another process is at work there.
        OSError: nothing can be written there.
    """
    refuse_unwritable(folder, setting)
    lock = FileLock(folder / LOCK)
    if not lock.take(this_process()):
        raise ValueError(
            f"{folder} is in use by {holder(lock.file)}: wait for its end or end it, or give another {setting}"
        )
    if not lock.supported:
        print(
            f"the file system of {folder} has no locks: see to it that no other command works there",
            file=sys.stderr,
        )
    try:
        if lock.supported:
            remove_unfinished(folder, but_below=LOCK)
        yield
    finally:
        lock.give_back()
