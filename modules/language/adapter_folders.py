"""Adapters on disk: a folder in PEFT's form, or one with such a folder for each of several adapters.

``folder/adapter_config.json`` and its weights are one adapter; ``folder/adapter0``, ``folder/adapter1``, ... are several,
each of which ``PeftModel.from_pretrained`` loads alone.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from fedlight.support.files import sealed, unsealed, write_whole

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
CHECKSUMS = "checksums.json"
"""Digests of the other two, which safetensors does not have: a flipped bit would be another weight."""


def adapter_names(num_adapters: int) -> list[str]:
    """What PEFT calls the adapters.

    Example:
        >>> adapter_names(1), adapter_names(3)
        (['default'], ['adapter0', 'adapter1', 'adapter2'])
    """
    return ["default"] if num_adapters == 1 else [f"adapter{index}" for index in range(num_adapters)]


def check_merge(merge: bool, adapter: str | None, base: str) -> None:
    """Refuses to merge nothing, or into rounded weights.

    Raises:
        ValueError: see above.
    """
    if merge and adapter is None:
        raise ValueError("merge_adapter=true needs an adapter to merge: set adapter to its folder")
    if merge and base != "plain":
        raise ValueError(
            f"merge_adapter=true with base={base!r} would round the merged weights: merge into a plain base, "
            "save that with save_merged, and give the folder as model"
        )


def planned_names(num_adapters: int, folder: str | None, merge: bool) -> list[str]:
    """Names of the adapters that a module will have: as many as the folder that it starts from, if that has several.

    Raises:
        FileNotFoundError: there is no adapter in the folder.
        ValueError: the folder has several adapters, but another number is asked for, or one to merge.

    Example:
        >>> planned_names(2, folder=None, merge=False)
        ['adapter0', 'adapter1']
    """
    if folder is None:
        return adapter_names(num_adapters)
    found = len(adapter_folders(folder, "adapter"))
    if found > 1 and merge:
        raise ValueError(
            f"merge_adapter=true merges one adapter, but adapter={folder!r} has {found}: give one of its folders, "
            "such as adapter0 in it"
        )
    if found > 1 and num_adapters not in (1, found):
        raise ValueError(
            f"num_adapters={num_adapters}, but adapter={folder!r} has {found} adapters: leave num_adapters out, or "
            "start all from one of them, such as adapter0 in it"
        )
    return adapter_names(max(found, num_adapters))


def adapter_folders(folder: str, setting: str) -> list[str]:
    """The PEFT folders in a folder of :func:`save_adapters`: itself, or ``adapter0``, ``adapter1``, ... in it.

    Raises:
        FileNotFoundError: there is none, or one is missing.
        ValueError: the folder has both, or a file is not what was saved.
    """
    saved = _saved_names(folder)
    if "default" in saved and len(saved) > 1:
        raise ValueError(
            f"{setting}={folder!r} has an adapter of its own and {len(saved) - 1} in folders: give one of these, or "
            "move them away"
        )
    several = [] if "default" in saved else [f"adapter{index}" for index in range(len(saved))]
    found = [str(Path(folder) / name) for name in several] or [folder]
    for one in found:
        for name in (CONFIG, WEIGHTS):
            if not (Path(one) / name).is_file():
                raise FileNotFoundError(
                    f"{setting}={one!r} has no {name}: give a folder written by save_adapter"
                )
        _check_sums(Path(one), setting)
    return found


def _check_sums(folder: Path, setting: str) -> None:
    """Compares an adapter with what was saved; one that was not saved by fedlight has nothing to compare with."""
    sums = folder / CHECKSUMS
    if not sums.is_file():
        return
    try:
        digests = unsealed(json.loads(sums.read_bytes()))["files"]
        damaged = next((name for name in digests if _digest(folder / name) != digests[name]), None)
    except (ValueError, KeyError, TypeError, AttributeError, FileNotFoundError):
        damaged = CHECKSUMS
    if damaged is not None:
        raise ValueError(
            f"{setting}={str(folder)!r}: {damaged} is not what was saved: have the adapter made again, or remove "
            f"{CHECKSUMS} if it was changed on purpose"
        )


def _digest(file: Path) -> str:
    return hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()


def _saved_names(folder: str | Path) -> set[str]:
    """Names of the adapters in a folder, by their numbers."""
    names = {path.parent.name for path in Path(folder).glob("adapter*/adapter_config.json")}
    own = {"default"} if (Path(folder) / "adapter_config.json").is_file() else set()
    return {name for name in names if name.removeprefix("adapter").isdecimal()} | own


def save_adapters(network: Any, folder: str | Path) -> None:
    """Writes the adapter as a PEFT folder; several as one such folder each, ``adapter0``, ``adapter1``, ... in it.

    Raises:
        ValueError: there are adapters in the folder that would stay: the two would be taken for one set.
    """
    left = _saved_names(folder) - set(network.peft_config)
    if left:
        raise ValueError(
            f"save_adapter({str(folder)!r}): the folder has other adapters ({', '.join(sorted(left))}), which would "
            "stay among these: give an empty folder"
        )
    # Without the argument PEFT asks the hub whether the vocabulary has grown.
    network.save_pretrained(str(folder), save_embedding_layers=False)
    for name in network.peft_config:
        own = Path(folder) if name == "default" else Path(folder) / name
        digests = {file: _digest(own / file) for file in (CONFIG, WEIGHTS)}
        write_whole(own / CHECKSUMS, json.dumps(sealed({"files": digests})) + "\n")


def adapter_checksum(folder: str) -> str:
    """Sixteen hex digits of the weights in a PEFT folder."""
    return _digest(Path(folder) / WEIGHTS)
