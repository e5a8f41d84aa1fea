"""``run.json``: the commands that were run in a folder, with versions, times and the kind of machine.

The file lies in the trainer's ``default_root_dir`` if that is set, with an entry for each command, the newest last: a run
may be resumed, and then tested. A finished command has digests of the tables that it wrote. Configs are named without their
folders; host and user are not recorded.
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

from fedlight.runs.contents import tables_since
from fedlight.support.files import read_json, sealed, write_json
from fedlight.support.results import versions

NAME = "run.json"


@contextmanager
def recorded(folder: Path, command: str, argv: Sequence[str], seed: Any) -> Iterator[dict[str, Any]]:
    """Write an entry for a Lightning command when the block begins, and its end when the block ends.

    The block is given a dictionary, and adds to it what else the entry says of the end.
    """
    file = folder / NAME
    entry: dict[str, Any] = {
        "command": command,
        "configs": configs(argv),
        "other_arguments": sum(argument.startswith("-") for argument in argv) - len(configs(argv)),
        "seed": seed,
        "versions": {"python": platform.python_version(), **versions()},
        "machine": machine(),
        "threads": torch.get_num_threads(),  # sums of another number of threads differ in their last bits
        "start": _now(),
        "state": "running",
    }
    others = _entries(file)
    if others is None:
        # The record is no result: its damage need not stop the work.
        kept = file.with_name("run.damaged.json")
        os.replace(file, kept)
        print(f"{file} is damaged: it is kept as {kept.name}, and a new one begun", file=sys.stderr)
        others = []
    write_json(file, sealed({"commands": [*others, entry]}))
    # The time of this file, by the clock of its file system, is before that of all that the command writes.
    began, start, state = time.monotonic(), file.stat().st_mtime_ns, "failed"
    ended: dict[str, Any] = {}
    try:
        yield ended
        state = ended.get("state", "done")
    except (KeyboardInterrupt, SystemExit):
        state = "stopped"
        raise
    finally:
        # A killed command never comes here, and stays "running" in its record.
        ended |= {"state": state, "end": _now(), "seconds": round(time.monotonic() - began, 1)}
        if state == "done":
            ended["files"] = tables_since(folder, start)
        write_json(file, sealed({"commands": [*others, {**entry, **ended}]}))


def last_fit(folder: Path) -> dict[str, Any] | None:
    """Return the entry of the last ``fit`` in a folder, empty where the record is damaged; None without one."""
    entries = _entries(folder / NAME)
    if entries is None:
        return {}
    return next((entry for entry in reversed(entries) if entry["command"] == "fit"), None)


def configs(argv: Sequence[str]) -> list[str]:
    """Return the names of the config files that a command's arguments give, in order and without their folders.

    Examples:
        >>> configs(["fit", "--config", "a/b.yaml", "-c=c.yaml", "--federated.fleet", "phones.yaml"])
        ['b.yaml', 'c.yaml']
    """
    names = []
    for argument, following in zip(argv, [*argv[1:], ""], strict=True):
        option, equals, value = argument.partition("=")
        if option in ("--config", "-c"):
            names.append(Path(value if equals else following).name)
    return names


def machine() -> str:
    """Return the kind of machine: system, cores, memory in GiB and GPUs, without its name."""
    words = [platform.system(), platform.machine(), f"{os.cpu_count()} cores"]
    if "SC_PHYS_PAGES" in os.sysconf_names:
        words.append(f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB")
    words += [torch.cuda.get_device_name(place) for place in range(torch.cuda.device_count())]
    return ", ".join(words)


def _entries(file: Path) -> list[Any] | None:
    """Return the entries of earlier commands; None for a damaged file."""
    try:
        entries = read_json(file, "")["commands"]
        return entries if all("command" in entry for entry in entries) else None
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError):
        return None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
