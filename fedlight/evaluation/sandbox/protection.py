"""Protection from a process: the means of this machine, and the order that makes a process lock itself.

Landlock bounds the files: the libraries for reading, the process's own folder for reading and writing. The standard
library's folder itself cannot be listed, or its packages could be; imports use the listing that the interpreter took before
it was locked.

Landlock is the kernel's means for a process without rights to give up access to files (Linux 5.13 and later). Here it
forbids execution, and new folders and links, so that the own folder stays flat. Version 4 also denies TCP, and 6
sockets and signals to others; the filter of system calls refuses these anyway. Landlock does not hide whether a known
path exists, its size and times (stat). Source: linux/landlock.h, Documentation/userspace-api/landlock.rst.
"""

import ctypes
import errno
import platform
import struct
import sys
import sysconfig
from pathlib import Path

from fedlight.evaluation.sandbox.process import SandboxError
from fedlight.evaluation.sandbox.seccomp import MACHINES, seccomp_filter

GET_SECCOMP = 21  # linux/prctl.h
REMEDY = (
    "Run on a machine that offers it, or, inside a container or a machine that you can afford to lose, "
    "with unprotected=True (time and memory are limited, files, network and processes are open to the code)"
)

CREATE_RULESET = 444  # the same number on every machine
WRITE_FILE, READ_FILE, READ_DIR, REMOVE_FILE, MAKE_FILE, TRUNCATE = (1 << bit for bit in (1, 2, 3, 5, 8, 14))
RIGHTS = {  # version -> all rights on files from this version on
    1: (1 << 13) - 1,
    2: (1 << 14) - 1,
    3: (1 << 15) - 1,
    5: (1 << 16) - 1,
}
TCP, SCOPES = 0b11, 0b11  # bind and connect; abstract sockets and signals

FILES = ["/etc/ld.so.cache", "/usr/share/zoneinfo", "/dev/urandom"]
LIBRARIES = ["/lib", "/lib64", "/usr/lib", "/usr/lib64"]
PARTS_OF_LIBRARIES = ("glibc-hwcaps", "ossl-modules")
"""Folders with shared libraries inside the folders above; there is also the machine's, ``x86_64-linux-gnu``."""
PACKAGES = ("site-packages", "dist-packages")


def protection(folder: Path) -> dict[str, object]:
    """Return the order that makes a process lock itself, with ``folder`` as its only writable place.

    Raises:
        SandboxError: this machine cannot do it; the message names the missing part.
    """
    if missing := missing_protection():
        raise SandboxError(f"code of a model is not run unprotected: {missing}. {REMEDY}.")
    version, machine = landlock_version(), MACHINES[platform.machine()]
    return {
        "ruleset": ruleset(version).hex(),
        "rules": rules(version, folder),
        "capset": machine.capset,
        "filter": seccomp_filter(machine).hex(),
    }


def missing_protection() -> str | None:
    """Return the part that this machine lacks for protection, None if it lacks none."""
    if sys.platform != "linux":
        return f"the sandbox needs Landlock and seccomp of Linux, and this is {sys.platform}"
    if platform.machine() not in MACHINES or sys.maxsize < 1 << 32:  # also a 32-bit Python on such a machine
        return f"the sandbox knows the system calls of {' and '.join(MACHINES)} (64 bits), and this is {platform.machine()}"
    if ctypes.CDLL(None).prctl(GET_SECCOMP, 0, 0, 0, 0) < 0:
        return f"kernel {platform.release()} offers no filter of system calls (seccomp)"
    try:
        landlock_version()
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            return "Landlock was left out when this machine started (add landlock to the kernel's parameter lsm=)"
        return (
            f"kernel {platform.release()} offers no Landlock ({error.strerror}): it needs Linux 5.13 or later, "
            "and a container that lets it through"
        )
    return None


def landlock_version() -> int:
    """Return the kernel's version of Landlock.

    Raises:
        OSError: the kernel has none (``ENOSYS``), or it was disabled when the machine started (``EOPNOTSUPP``).
    """
    kernel = ctypes.CDLL(None, use_errno=True)
    # Flag 1, LANDLOCK_CREATE_RULESET_VERSION: no ruleset is made.
    version: int = kernel.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    if version < 1:
        number = ctypes.get_errno() or errno.ENOSYS
        raise OSError(number, errno.errorcode.get(number, str(number)))
    return version


def file_rights(version: int) -> int:
    """Return all rights that this version can deny, as bits."""
    return RIGHTS[max(known for known in RIGHTS if known <= version)]


def ruleset(version: int) -> bytes:
    """Return ``struct landlock_ruleset_attr``: the rights denied without a rule; newer kernels know more of its fields."""
    fields = [file_rights(version)] + [TCP] * (version >= 4) + [SCOPES] * (version >= 6)
    return struct.pack(f"={len(fields)}Q", *fields)


def rules(version: int, folder: Path) -> list[tuple[str, int]]:
    """Return paths and the rights beneath them; files may be written in ``folder`` only."""
    # The compiled part of the standard library may have a separate folder.
    folders = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    # A rule holds for everything beneath a path, without exceptions, and packages lie in these folders:
    # each entry beside site-packages and dist-packages gets a separate rule.
    entries = [entry for at in folders for entry in _entries(Path(at)) if entry.name not in PACKAGES]
    paths: list[str | Path] = [*FILES, *entries, *_shared_libraries()]
    readable = sorted({str(Path(path).resolve()) for path in paths if Path(path).exists()})
    read_only = [(path, READ_FILE | (READ_DIR if Path(path).is_dir() else 0)) for path in readable]
    changes = READ_FILE | WRITE_FILE | READ_DIR | REMOVE_FILE | MAKE_FILE | TRUNCATE
    return [*read_only, ("/dev/null", READ_FILE | WRITE_FILE), (str(folder), changes & file_rights(version))]


def _shared_libraries() -> list[Path]:
    """Return the libraries that the linker loads for the compiled standard library, without files of other programs."""
    folders = [*LIBRARIES, sysconfig.get_config_var("LIBDIR") or "/usr/lib"]
    parts = (*PARTS_OF_LIBRARIES, sysconfig.get_config_var("MULTIARCH"))
    return [
        entry
        for folder in folders
        for entry in _entries(Path(folder))
        if ".so" in entry.suffixes or entry.name in parts
    ]


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []
