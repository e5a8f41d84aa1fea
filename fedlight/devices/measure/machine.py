"""Processor, memory and energy counters of this machine, as Linux and torch report them."""

import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path

import torch

MEMINFO, CPUINFO = Path("/proc/meminfo"), Path("/proc/cpuinfo")
STAT, IDLE = Path("/proc/stat"), slice(3, 5)  # idle, and wait for input and output
LIMIT, USED = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
POWERCAP = Path("/sys/class/powercap")
"""Folder of RAPL, the energy counters of processors of Intel and AMD."""


def processor(device: torch.device) -> str:
    """Return the name of the GPU or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = CPUINFO.read_text(encoding="utf-8").splitlines() if CPUINFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def memory(device: torch.device) -> tuple[int, int | None]:
    """Return all memory and the part that is free, in bytes, within the limit of a container; None where it is not known."""
    if device.type == "cuda":
        free, size = torch.cuda.mem_get_info(device)
        return size, free
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = MEMINFO.read_text(encoding="utf-8").splitlines() if MEMINFO.exists() else []
    known = (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))  # in KiB
    available = next(known, None)
    limit = LIMIT.read_text().strip() if LIMIT.exists() else "max"
    if limit != "max" and int(limit) < size:
        size = int(limit)
        left = size - int(USED.read_text())
        available = left if available is None else min(available, left)
    return size, available


def load(seconds: float) -> float | None:
    """Return how many cores are busy while this process sleeps for so long; None where the system does not say."""
    if not STAT.exists():
        return None
    before = _ticks()
    time.sleep(seconds)
    ticks = [now - then for now, then in zip(_ticks(), before, strict=True)]
    whole = sum(ticks)
    return (os.cpu_count() or 1) * (whole - sum(ticks[IDLE])) / whole if whole else 0.0


def _ticks() -> list[int]:
    """Return the time of all cores by its kinds: user, nice, system, idle, wait for input and output, and interrupts."""
    first = STAT.read_text(encoding="utf-8").partition("\n")[0]
    return [int(number) for number in first.split()[1:9]]  # guests are counted as users


class Rapl:
    """Energy counters of the processor's packages, in a folder.

    Raises:
        OSError: there are none, or they cannot be read.
    """

    def __init__(self, root: Path = POWERCAP) -> None:
        packages = [zone for zone in sorted(root.glob("intel-rapl:*")) if zone.name.count(":") == 1]
        # Others count parts of a package, or the whole platform, packages included.
        self._zones = [zone for zone in packages if (zone / "name").read_text().startswith("package")]
        if not self._zones:
            raise OSError(f"{root} has no counters of the processor (RAPL)")
        self.read()

    def read(self) -> dict[Path, int]:
        """Return package -> microjoules so far; the count begins anew at its largest value."""
        return {zone: int((zone / "energy_uj").read_text()) for zone in self._zones}

    def joules(self, before: Mapping[Path, int], after: Mapping[Path, int]) -> float:
        """Return the energy between two readings; the counter may have begun anew once in between."""
        spent = 0
        for zone, start in before.items():
            passed = after[zone] - start
            spent += passed if passed >= 0 else passed + int((zone / "max_energy_range_uj").read_text())
        return spent / 1e6
