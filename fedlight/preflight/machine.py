"""Memory and free disk of this machine."""

import os
import shutil
from pathlib import Path
from typing import NamedTuple

import torch

GB = 10**9


class MachineMemory(NamedTuple):
    """Memory in bytes, and a phrase for messages, such as "the GPU has 80.0 GB"."""

    size: int
    words: str


def memory_of(cuda: bool) -> MachineMemory:
    """Return the memory of the first GPU, or of the machine."""
    if cuda:
        size = torch.cuda.get_device_properties(0).total_memory
        return MachineMemory(size, f"the GPU has {size_text(size)}")
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return MachineMemory(size, f"this machine has {size_text(size)}")


def existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    return next(place for place in (folder, *folder.parents) if place.exists())


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk that a folder lies on or will lie on."""
    return shutil.disk_usage(existing(folder)).free


def same_disk(folder: Path, other: Path) -> bool:
    """Return whether both folders lie on the same file system."""
    return existing(folder).stat().st_dev == existing(other).stat().st_dev


def size_text(size: float) -> str:
    """Return bytes as text, in GB or MB, such as ``16.1 GB``."""
    return f"{size / GB:.1f} GB" if size >= GB else f"{size / 10**6:.1f} MB"
