"""``run.json``: which commands made a folder, with which versions, when, on what kind of machine.

It stands in the trainer's ``default_root_dir`` where that is given, with an entry for each command, the newest last: a run
may be resumed, and then tested. One that came to its end has digests of the tables that it left. Configs are named without
their folders; neither host nor user are told.
"""

import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from fedlight.support.contents import tables_since
from fedlight.support.files import read_json, sealed, write_json
from fedlight.support.results import versions

NAME = "run.json"


@contextmanager
def recorded(folder: Path, command: str, argv: Sequence[str], seed: Any) -> Iterator[None]:
    """Writes an entry when the block is entered, and how it ended when it is left.

    Args:
        folder: of the results.
        command: ``fit``, ``validate``, ``test`` or ``predict``.
        argv: what the command was called with.
        seed: ``seed_everything``.
    """
    file = folder / NAME
    entry: dict[str, Any] = {
        "command": command,
        "configs": configs(argv),
        "seed": seed,
        "versions": {"python": platform.python_version(), **versions()},
        "machine": machine(),
        "start": _now(),
        "state": "running",
    }
    others = _entries(file)
    write_json(file, sealed({"commands": [*others, entry]}))
    began, start, state = time.monotonic(), time.time(), "failed"
    try:
        yield
        state = "done"
    except (KeyboardInterrupt, SystemExit):
        state = "stopped"
        raise
    finally:
        ended: dict[str, Any] = {
            "state": state,
            "end": _now(),
            "seconds": round(time.monotonic() - began, 1),
        }
        if state == "done":
            ended["files"] = tables_since(folder, start)
        write_json(file, sealed({"commands": [*others, {**entry, **ended}]}))


def configs(argv: Sequence[str]) -> list[str]:
    """The names of the files that a command was given, in order.

    Example:
        >>> configs(["fit", "--config", "/home/me/fedbis.yaml", "--data=data/alpaca.yaml", "--model.lr=0.1"])
        ['fedbis.yaml', 'alpaca.yaml']
    """
    values = [argument.rpartition("=")[2] for argument in argv]
    return [Path(value).name for value in values if value.endswith((".yaml", ".yml"))]


def machine() -> str:
    """The machine in words: system, cores, memory in GiB and GPUs; nothing that names it."""
    words = [platform.system(), platform.machine(), f"{os.cpu_count()} cores"]
    if "SC_PHYS_PAGES" in os.sysconf_names:
        words.append(f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB")
    words += [torch.cuda.get_device_name(place) for place in range(torch.cuda.device_count())]
    return ", ".join(words)


def _entries(file: Path) -> list[Any]:
    """What earlier commands wrote; a damaged file is kept under another name, as it is no result and stops no work."""
    try:
        found = read_json(file, "")["commands"]
        if isinstance(found, list):
            return found
    except FileNotFoundError:
        return []
    except (ValueError, KeyError):
        pass
    kept = file.with_name("run.damaged.json")
    os.replace(file, kept)
    print(f"{file} is damaged: it is kept as {kept.name}, and a new one begun", file=sys.stderr)
    return []


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
