"""Adapters on disk: a folder in PEFT's form, or a folder with one such folder for each of several adapters.

``folder/adapter_config.json`` and its weights are one adapter; ``folder/adapter0``, ``folder/adapter1``, ... are several;
``PeftModel.from_pretrained`` loads each of them alone.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from fedlight.support.files import read_bytes, read_text, sealed, unsealed, write_whole

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
COMPILED = "._orig_mod"
CHECKSUMS = "checksums.json"
"""File with digests of the other two: safetensors has none and would load a flipped bit as another weight."""


def name_adapters(num_adapters: int) -> list[str]:
    """Return PEFT's names of the adapters.

    Examples:
        >>> name_adapters(1), name_adapters(3)
        (['default'], ['adapter0', 'adapter1', 'adapter2'])
    """
    return ["default"] if num_adapters == 1 else [f"adapter{index}" for index in range(num_adapters)]


def check_merge(merge: bool, adapter: str | None, base: str) -> None:
    """Raise ValueError for a merge without an adapter, or into rounded weights."""
    if merge and adapter is None:
        raise ValueError("merge_adapter=true needs an adapter to merge: set adapter to its folder")
    if merge and base != "plain":
        raise ValueError(
            f"merge_adapter=true with base={base!r} would round the merged weights: merge into a plain base, "
            "save that with save_merged, and give the folder as model"
        )


def plan_names(num_adapters: int, folder: str | None, merge: bool) -> list[str]:
    """Return the names of a module's adapters, as many as in the folder that it starts from if that has several.

    Raises:
        FileNotFoundError: the folder has no adapter.
        ValueError: the folder has several adapters, and another number or a merge is asked for.

    Examples:
        >>> plan_names(2, folder=None, merge=False)
        ['adapter0', 'adapter1']
    """
    if folder is None:
        return name_adapters(num_adapters)
    number = len(find_adapters(folder))
    if number > 1 and merge:
        raise ValueError(
            f"merge_adapter=true merges one adapter, but adapter={folder!r} has {number}: give one of its folders, "
            "such as adapter0 in it"
        )
    if number > 1 and num_adapters not in (1, number):
        raise ValueError(
            f"num_adapters={num_adapters}, but adapter={folder!r} has {number} adapters: leave num_adapters out, or "
            "start all from one of them, such as adapter0 in it"
        )
    return name_adapters(max(number, num_adapters))


def find_adapters(folder: str) -> list[str]:
    """Return the PEFT folders in a folder of `save_adapters`: itself, or ``adapter0``, ``adapter1``, ... in it.

    Raises:
        FileNotFoundError: an adapter is missing.
        ValueError: the folder has both kinds, or a file differs from its saved digest.
    """
    saved = _find_names(folder)
    if "default" in saved and len(saved) > 1:
        raise ValueError(
            f"adapter={folder!r} has an adapter of its own and {len(saved) - 1} in folders: give one of these, or "
            "move them away"
        )
    several = [] if "default" in saved else [f"adapter{index}" for index in range(len(saved))]
    folders = [str(Path(folder) / name) for name in several] or [folder]
    for path in folders:
        for name in (CONFIG, WEIGHTS):
            if not (Path(path) / name).is_file():
                raise FileNotFoundError(
                    f"adapter={path!r} has no {name}: give a folder written by save_adapter"
                )
        _check_digests(Path(path))
    return folders


def _check_digests(folder: Path) -> None:
    """Compare an adapter with its saved digests; an adapter that fedlight did not save has none."""
    checksums = folder / CHECKSUMS
    if not checksums.is_file():
        return
    try:
        digests = unsealed(json.loads(read_bytes(checksums)))["files"]
        damaged = next((name for name in digests if _digest(folder / name) != digests[name]), None)
    except (ValueError, KeyError, TypeError, AttributeError, FileNotFoundError):
        damaged = CHECKSUMS
    if damaged is not None:
        raise ValueError(
            f"adapter={str(folder)!r}: {damaged} is not what was saved: make the adapter again, or remove "
            f"{CHECKSUMS} if it was changed on purpose"
        )


def _digest(file: Path) -> str:
    return hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()


def _find_names(folder: str | Path) -> set[str]:
    names = {path.parent.name for path in Path(folder).glob(f"adapter*/{CONFIG}")}
    single = {"default"} if (Path(folder) / CONFIG).is_file() else set()
    return {name for name in names if name.removeprefix("adapter").isdecimal()} | single


def save_adapters(network: Any, folder: str | Path) -> None:
    """Write the adapter as a PEFT folder, or several as one such folder each, ``adapter0``, ``adapter1``, ... in it.

    Raises:
        ValueError: the folder has other adapters, which would stay and be read together with these.
    """
    left = _find_names(folder) - set(network.peft_config)
    if left:
        raise ValueError(
            f"save_adapter({str(folder)!r}): the folder has other adapters ({', '.join(sorted(left))}), which would "
            "stay among these: give an empty folder"
        )
    # Without save_embedding_layers PEFT asks the hub whether the vocabulary has grown.
    network.save_pretrained(str(folder), save_embedding_layers=False)
    is_compiled = any(COMPILED in name for name, _ in network.named_modules())
    for name in network.peft_config:
        place = Path(folder) if name == "default" else Path(folder) / name
        if is_compiled:
            _name_as_uncompiled(place / WEIGHTS)
        _write_digests(place)


def _name_as_uncompiled(file: Path) -> None:
    """Take out of the names in a file what torch.compile has put there for layers: else other bases would not find them."""
    from safetensors.torch import load_file, save_file

    weights = {name.replace(COMPILED, ""): weight for name, weight in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})


def copy_adapters(folder: str | Path, target: Path, base: str) -> list[str]:
    """Copy the adapters of a folder into another one, where ``base`` is the name of the base model.

    Returns:
        The names of their folders, ``["default"]`` for one adapter in the folder itself.

    Raises:
        FileNotFoundError: an adapter is missing.
        ValueError: a file differs from its saved digest.
    """
    folders = find_adapters(str(folder))
    names = ["default"] if len(folders) == 1 else [Path(path).name for path in folders]
    for path, name in zip(folders, names, strict=True):
        written = target if name == "default" else target / name
        written.mkdir(exist_ok=True)
        shutil.copyfile(Path(path) / WEIGHTS, written / WEIGHTS)
        config = json.loads(read_text(Path(path) / CONFIG))
        config["base_model_name_or_path"] = base  # PEFT writes where it lay, maybe a folder here
        config["target_modules"] = sorted(config["target_modules"])  # a set, in another order each time
        write_whole(written / CONFIG, json.dumps(config, indent=2) + "\n")
        _write_digests(written)
    return names


def _write_digests(folder: Path) -> None:
    digests = {file: _digest(folder / file) for file in (CONFIG, WEIGHTS)}
    write_whole(folder / CHECKSUMS, json.dumps(sealed({"files": digests})) + "\n")


def adapter_checksum(folder: str) -> str:
    """Return sixteen hex digits of the weights in a PEFT folder."""
    return _digest(Path(folder) / WEIGHTS)
