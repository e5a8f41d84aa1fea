"""Memory and free disk of this machine, and the processes that share a recipe's stages on it."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from fedlight.devices.measure.machine import memory
from fedlight.preflight.finding import Finding, ok, problem
from fedlight.recipes.followers import for_processes
from fedlight.recipes.stages import Stage

GB = 10**9


class MachineMemory(NamedTuple):
    """Memory in bytes, and a phrase for messages, such as "the GPU has 80.0 GB"."""

    size: int
    words: str


def memory_of(cuda: bool) -> MachineMemory:
    """Return the memory of the first GPU, or of the machine."""
    size, _ = memory(torch.device("cuda" if cuda else "cpu"))
    return MachineMemory(size, f"{'the GPU' if cuda else 'this machine'} has {size_text(size)}")


def existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    return next(place for place in (folder, *folder.parents) if place.exists())


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk that a folder lies on or will lie on."""
    # The folder may not exist yet, and disk_usage would fail.
    return shutil.disk_usage(existing(folder)).free


def size_text(size: float) -> str:
    """Return bytes as text, in GB or MB, such as ``16.1 GB``."""
    return f"{size / GB:.1f} GB" if size >= GB else f"{size / 10**6:.1f} MB"


def check_shared(stages: Sequence[Stage], processes: int) -> list[Finding]:
    """Return a finding for the stages that the processes share, one for each reason to run others in one process.

    A stage whose config sets a strategy is a problem.
    """
    shared: list[str] = []
    alone: dict[str, list[str]] = {}
    findings: list[Finding] = []
    for stage in stages:
        try:
            cause = stage.why_one_process()
        except ValueError:  # the config cannot be read: `parse_stages` has a finding
            continue
        if cause is not None:
            alone.setdefault(cause, []).append(stage.name)
            continue
        shared.append(stage.name)
        try:
            for_processes(stage.config(), processes, stage.name)
        except ValueError as error:
            findings.append(problem(f"processes of {stage.name}", str(error)))
    named = "1 process" if processes == 1 else f"{processes} processes"
    findings.append(ok(named, f"for {', '.join(shared) or 'no stage'}"))
    findings += [ok("one process", f"for {', '.join(names)}: {cause}") for cause, names in alone.items()]
    return findings
