"""One clear line, before any work, where a folder cannot be written."""

import tempfile
from pathlib import Path


def refuse_unwritable(folder: Path, setting: str) -> None:
    """Make a folder and check that it can be written, before hours of work.

    Args:
        folder: folder for the results.
        setting: setting that names it.

    Raises:
        OSError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OSError(
            f"{setting}={folder} cannot be written ({error.strerror}): choose another folder"
        ) from error
