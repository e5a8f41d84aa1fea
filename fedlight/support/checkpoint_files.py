"""Checkpoint files of Lightning: whether they are whole, and whether training can go on from them."""

import re
import sys
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import eq
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from fedlight.support.files import moved
from fedlight.support.words import first_line


def check_readable(path: str | Path) -> None:
    """Raise FileNotFoundError if there is no such file, ValueError if it is damaged or no checkpoint of Lightning."""
    _content(path)


def check_resumable(path: str | Path, federated: bool | None = None) -> None:
    """Check that training can go on from a file; ``federated`` says whether a federation will, None does not check that.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged or no checkpoint, has the weights alone, or only one of checkpoint and run is a federation.
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


def newest_checkpoint(files: Iterable[Path], federated: bool | None = None) -> Path | None:
    """Return the newest of the checkpoints that training can go on from; print the name of one that is passed over.

    Of files of one tick of the clock the last by the numbers in its name. ``federated`` is as for `check_resumable`.
    """

    def age(file: Path) -> tuple[int, list[int]]:
        return file.stat().st_mtime_ns, [int(number) for number in re.findall(r"\d+", file.name)]

    for file in sorted(files, key=age, reverse=True):
        try:
            check_resumable(file, federated)
            return file
        except (ValueError, OSError) as error:
            print(f"passed over: {error}", file=sys.stderr)
    return None


def follow_moved_files(trainer: Any, checkpoint: dict[str, Any]) -> None:
    """Change a checkpoint that a trainer loads so that each ``ModelCheckpoint`` knows the files of its folder of before.

    That folder is another one where the run's was moved, or has a new version of its logger, and Lightning would forget the
    best epoch so far.
    """
    savers = [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
    states = [(each, checkpoint["callbacks"].get(each.state_key)) for each in savers]
    here = Path(trainer.ckpt_path).parent
    folders = [Path(state["dirpath"]) for _, state in states if state]
    # The checkpoint was written to the one that ends as its place now does.
    before = max(folders, key=lambda each: [*map(eq, each.parts[::-1], here.parts[::-1])], default=here)

    for saver, state in states:
        if state and state["dirpath"] != saver.dirpath:
            kept = state["best_k_models"].items()
            state["best_k_models"] = {moved(file, before, here): score for file, score in kept}
            paths = [name for name, file in state.items() if name.endswith("_path") and file]
            state |= {name: moved(state[name], before, here) for name in paths}
            state["dirpath"] = saver.dirpath


@contextmanager
def damage_named(path: str | Path) -> Iterator[None]:
    """Check the checksums of a checkpoint that the body loads, and name damage as the cause of the body's error.

    Nothing is checked if ``path`` is no local file. Raises ValueError if the file is damaged.
    """
    if not Path(path).is_file():
        yield
        return
    try:
        has_sums = check_sums(path)
    except Exception as error:  # a damaged directory can raise anything
        raise _damaged(path, error) from None
    try:
        yield
    except Exception as error:
        # torch's reader may find another directory in the file than the one that was checked.
        is_of_reader = isinstance(error, RuntimeError) and "PytorchStreamReader" in str(error)
        if has_sums and not is_of_reader:
            raise
        raise _damaged(path, error) from None


def check_sums(path: str | Path) -> bool:
    """Check the checksums of a file's parts, and return whether it has any.

    Raises ValueError if a part is damaged, zipfile.BadZipFile if the directory of the parts is.
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
        check_sums(path)  # torch.load does not check them: a flipped bit would change a weight
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # garbage can make the unpickler raise anything
        raise _damaged(path, error) from None
    if not isinstance(content, dict) or "state_dict" not in content:
        raise ValueError(f"checkpoint {str(path)!r} has no state_dict: it is not a checkpoint of Lightning")
    return content


def _damaged(path: str | Path, error: Exception) -> ValueError:
    reason = first_line(error)[:120]
    return ValueError(f"checkpoint {str(path)!r} is damaged or no checkpoint ({reason}): use another")
