"""One clear line where a disk is full: which file it is about, and what to do."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MESSAGE = "the disk is full"


@contextmanager
def full_disk_named(path: Path) -> Iterator[None]:
    """Turn the error of a full disk inside the block into one that names ``path`` and the remedy.

    In nested blocks the inner path is named.

    Raises:
        OSError: with ``errno.ENOSPC``.

    Example:
        >>> with full_disk_named(Path("runs/demo/visits.csv")):
        ...     raise OSError(errno.ENOSPC, "No space left on device")
        Traceback (most recent call last):
        OSError: [Errno 28] the disk is full while writing runs/demo/visits.csv: free some space and ...
    """
    try:
        yield
    except Exception as error:
        if not _is_full(error) or MESSAGE in str(error):
            raise
        raise OSError(
            errno.ENOSPC,
            f"{MESSAGE} while writing {path}: free some space and give the same command again; "
            "a recipe goes on from what is finished, fit from the checkpoint in --ckpt_path",
        ) from error


def _is_full(error: Exception) -> bool:
    """Return whether a disk is full; safetensors reports it with an error class of its own."""
    code = getattr(error, "errno", None)
    return code in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error)
