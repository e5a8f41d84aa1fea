"""Lock that one process holds as long as it lives: the kernel drops it with the process, however that ends.

So there are no stale locks to be told by process numbers, which are used again. The text in the file names the holder, for
people alone.
"""

import errno
import json
import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # no POSIX
    fcntl = None  # type: ignore[assignment]

HELD = {errno.EACCES, errno.EAGAIN}


def hold(path: Path, is_folder: bool = False) -> int | None:
    """Return a handle that holds a file or folder until it is closed or its process ends; it is made where it is missing.

    Returns:
        None where another handle holds it, it is another user's, a link, or has just been replaced.

    Raises:
        OSError: it cannot be made or opened, or the file system has no such locks.
    """
    if fcntl is None:
        raise OSError(errno.ENOTSUP, "no locks")
    if is_folder:
        path.mkdir(exist_ok=True)
    if path.is_symlink():
        return None
    flags = os.O_NOFOLLOW | (os.O_RDONLY | os.O_DIRECTORY if is_folder else os.O_RDWR | os.O_CREAT)
    try:
        handle = os.open(path, flags, 0o666)
    except (FileNotFoundError, PermissionError):  # just removed, or another user's
        return None
    try:
        # Not a record lock: it would end as soon as the process closes the file, which it writes by other handles.
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(handle).st_uid == os.geteuid() and is_at(handle, path):
            return handle
    except BlockingIOError:
        pass
    except OSError:
        os.close(handle)
        raise
    os.close(handle)
    return None


class FileLock:
    """Lock of the kernel on a file, which is made when the lock is taken and removed when it is released."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.supported = fcntl is not None  # where there are no locks, every process gets it
        self._handle: int | None = None

    def take(self, about: dict[str, Any] | None = None) -> bool:
        """Take the lock unless another process holds it, and return whether this process holds it now.

        The file gets ``about``, a description of the holder for `holder`.
        """
        while self._handle is None:
            handle = os.open(self.file, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                if not self._locked(handle):
                    return False
                if is_at(handle, self.file):  # else its holder has removed it between the two calls
                    self._handle = handle
            finally:
                if self._handle is None:
                    os.close(handle)
        if about is not None:
            self.write(json.dumps(about) + "\n")
        return True

    def write(self, text: str) -> None:
        """Write the file of a held lock; writing it in any other way would release the lock."""
        assert self._handle is not None
        # By the same handle: a record lock ends when its process closes any handle of the file.
        os.truncate(self._handle, 0)
        self.append(text, synced=True)

    def append(self, text: str, synced: bool = False) -> None:
        """Append to the file of a held lock; ``synced`` syncs it to the disk."""
        assert self._handle is not None
        os.lseek(self._handle, 0, os.SEEK_END)
        os.write(self._handle, text.encode())
        if synced:
            os.fsync(self._handle)

    def give_back(self, remove: bool = True) -> None:
        """Release the lock, and remove the file unless ``remove`` is False."""
        if self._handle is not None:
            if remove:
                self.file.unlink(missing_ok=True)
            os.close(self._handle)
            self._handle = None

    def _locked(self, handle: int) -> bool:
        if not self.supported:
            return True
        try:
            # A record lock: forked workers of a loader do not inherit it, and network file systems know it.
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in HELD:
                return False
            self.supported = False  # a network file system without locks
        return True


def is_at(handle: int, file: Path) -> bool:
    """Return whether the file or folder of a handle is still the one at a path."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(file))
    except FileNotFoundError:
        return False


def this_process() -> dict[str, Any]:
    """Return the description of this process as a holder: process, host, start, command."""
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]) if sys.argv else ""
    since = datetime.now(UTC).isoformat(timespec="seconds")
    return {"pid": os.getpid(), "host": platform.node(), "since": since, "command": command}


def holder(file: Path) -> str:
    """Return the holder of a lock in words, as far as the file names it, else "another process"."""
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
        words = f"process {about['pid']} on {about['host']} since {about['since']}"
        return f"{words} ({about['command']})" if about["command"] else words
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
