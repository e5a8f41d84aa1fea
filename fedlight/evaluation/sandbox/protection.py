"""Protection from a process: what this machine offers, and the order by which a process locks itself."""

import ctypes
import errno
import platform
import sys
from pathlib import Path

from fedlight.evaluation.sandbox import landlock
from fedlight.evaluation.sandbox.process import SandboxError
from fedlight.evaluation.sandbox.seccomp import MACHINES, seccomp_filter

GET_SECCOMP = 21  # linux/prctl.h
REMEDY = (
    "Run on a machine that offers it, or, inside a container or a machine that you can afford to lose, "
    "with unprotected=True (time and memory are limited, files, network and processes are open to the code)"
)


def protection(folder: Path) -> dict[str, object]:
    """Return the order by which a process locks itself, with ``folder`` as its only writable place.

    Raises:
        SandboxError: this machine cannot do it; the message names the missing part.
    """
    if missing := missing_protection():
        raise SandboxError(f"code of a model is not run unprotected: {missing}. {REMEDY}.")
    version, machine = landlock.landlock_version(), MACHINES[platform.machine()]
    return {
        "ruleset": landlock.ruleset(version).hex(),
        "rules": landlock.rules(version, folder),
        "capset": machine.capset,
        "filter": seccomp_filter(machine).hex(),
    }


def missing_protection() -> str | None:
    """Return the part that this machine lacks for protection, None if it lacks none."""
    if sys.platform != "linux":
        return f"the sandbox needs Landlock and seccomp of Linux, and this is {sys.platform}"
    if platform.machine() not in MACHINES or sys.maxsize < 1 << 32:
        return f"the sandbox knows the system calls of {' and '.join(MACHINES)} (64 bits), and this is {platform.machine()}"
    if ctypes.CDLL(None).prctl(GET_SECCOMP, 0, 0, 0, 0) < 0:
        return f"kernel {platform.release()} offers no filter of system calls (seccomp)"
    try:
        landlock.landlock_version()
    except OSError as error:
        return _why_no_landlock(error)
    return None


def _why_no_landlock(error: OSError) -> str:
    if error.errno == errno.EOPNOTSUPP:
        return "Landlock was left out when this machine started (add landlock to the kernel's parameter lsm=)"
    return (
        f"kernel {platform.release()} offers no Landlock ({error.strerror}): it needs Linux 5.13 or later, "
        "and a container that lets it through"
    )
