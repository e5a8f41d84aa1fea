"""One clear line, before any work, where a folder cannot be written."""

import tempfile
from pathlib import Path


def refuse_unwritable(folder: Path, setting: str) -> None:
    """Makes a folder and tries it, before hours of work whose results must have somewhere to go.

    Args:
        folder: where they will be written.
        setting: that says so.

    Raises:
        OSError: nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OSError(
            f"{setting}={folder} cannot be written ({error.strerror}): choose another folder"
        ) from error
