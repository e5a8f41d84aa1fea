"""The machine's class, which may change floating-point results, and the versions and the commit of the program."""

import platform
import subprocess
from pathlib import Path
from typing import Any

from published.measurements import ROOT

CPUINFO = Path("/proc/cpuinfo")
VENDORS = {"AuthenticAMD": "AMD", "GenuineIntel": "Intel"}
THREADS = 1  # of a measurement, so that its figures do not depend on the number of cores


def machine() -> dict[str, Any]:
    """``class``, which is compared between machines, and how many threads a measurement has."""
    import torch

    lines = CPUINFO.read_text().splitlines() if CPUINFO.is_file() else []
    said = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    vendor = said.get("vendor_id", "")
    # Kernels are cut to the sizes of the caches, so a family's figures are not its successor's: in 600 small steps
    # the last bits become other answers.
    family = ".".join(said[key] for key in ("cpu family", "model") if key in said)
    capability = torch.backends.cpu.get_cpu_capability()
    words = [platform.machine(), VENDORS.get(vendor, vendor), family, capability]
    return {"class": " ".join(word for word in words if word), "threads": THREADS}


def versions() -> dict[str, str]:
    """Of Python and of the packages that determine the numbers."""
    from fedlight.support.results import versions

    return {"python": platform.python_version(), **versions()}


def commit() -> str:
    """The commit that is checked out.

    Raises:
        ValueError: files of the code have been changed since, or there is no repository.
    """
    if changed := _git("status", "--porcelain", "--", ":!docs").strip():
        raise ValueError(
            f"figures are recorded with the commit that makes them, and these are not committed:\n{changed}\n"
            "commit them first, or give --commit"
        )
    return _git("rev-parse", "--short=7", "HEAD").strip()


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"git {words[0]} fails ({done.stderr.strip()}): give --commit")
    return done.stdout
