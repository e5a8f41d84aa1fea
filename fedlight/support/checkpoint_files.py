"""Checkpoint files of Lightning as such: whether they are whole, and whether training can go on from them.

torch stores checksums of the parts of a file and does not look at them when it loads: a flipped bit would be another weight.
"""

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


def check_readable(path: str | Path) -> None:
    """Refuses a file that is not a whole checkpoint of Lightning.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged or something else.
    """
    _content(path)


def check_resumable(path: str | Path, federated: bool | None = None) -> None:
    """Refuses a file from which training cannot go on.

    Args:
        path: of the file.
        federated: is it a federation that will go on? None: that is not looked at.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged or something else, has the weights alone, was written inside a round by an earlier
            version, or is of a federation and will be none, or the other way round.
    """
    content = _content(path)
    if "optimizer_states" not in content:
        raise ValueError(
            f"checkpoint {str(path)!r} has the weights alone, so training cannot go on from it: use another, and "
            "ModelCheckpoint(save_weights_only=False)"
        )
    of_loop = content.get("callbacks", {}).get("FederatedLoop")
    if federated is False and of_loop is not None:
        raise ValueError(
            f"checkpoint {str(path)!r} is of a federated run, and this one has no federation: give the setting federated "
            "as it was, or start anew without the checkpoint"
        )
    if federated and of_loop is None:
        raise ValueError(
            f"checkpoint {str(path)!r} is of a run without a federation, and this one has the setting federated: set it to "
            "null, or start anew without the checkpoint"
        )
    if (of_loop or {}).get("inside_round"):
        raise ValueError(
            f"checkpoint {str(path)!r} was written inside a round by an earlier version and holds one client's local "
            "weights: use another"
        )


@contextmanager
def damage_named(path: str | Path) -> Iterator[None]:
    """Compares the checksums of a file, and says of what its block raises for a damaged one that it is damaged.

    Args:
        path: of a checkpoint that the block loads. Nothing is looked at where it is no file here.

    Raises:
        ValueError: the file is damaged.
    """
    if not Path(path).is_file():
        yield
        return
    try:
        has_sums = check_sums(path)
    except Exception as error:  # whatever the reader of a damaged directory runs into
        raise _damaged(path, error) from None
    try:
        yield
    except (
        RuntimeError
    ) as error:  # of torch's reader, which may see another directory than the one that was checked
        if "PytorchStreamReader" in str(error) or not has_sums:
            raise _damaged(path, error) from None
        raise
    except Exception as error:
        if has_sums:
            raise
        raise _damaged(path, error) from None


def check_sums(path: str | Path) -> bool:
    """Compares the checksums that a file has of its parts.

    Returns:
        Whether it has any.

    Raises:
        ValueError: a part is another one than was written.
        zipfile.BadZipFile: the directory of the parts is damaged.
    """
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as parts:
        if (damaged := parts.testzip()) is not None:
            raise ValueError(f"checksum of {damaged}")
    return True


def _content(path: str | Path) -> dict[str, Any]:
    if not Path(path).is_file():
        raise FileNotFoundError(f"checkpoint {str(path)!r}: there is no such file")
    try:
        check_sums(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # garbage can make the unpickler raise anything
        raise _damaged(path, error) from None
    if not isinstance(content, dict) or "state_dict" not in content:
        raise ValueError(f"checkpoint {str(path)!r} has no state_dict: it is not a checkpoint of Lightning")
    return content


def _damaged(path: str | Path, error: Exception) -> ValueError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0][:120]
    return ValueError(f"checkpoint {str(path)!r} is damaged or no checkpoint ({reason}): use another")
