"""Rules for the files that code in the sandbox may open: the libraries for reading, its own folder for reading and writing.

A rule of Landlock holds for everything beneath a path, without exceptions. Installed packages lie inside the standard
library's folder (``site-packages``) and among the system's libraries (``dist-packages``), so each entry beside them has a
rule of its own. The standard library's folder itself cannot be listed, or its packages could be; imports use the listing
that the interpreter took before it was locked.

Landlock is the kernel's means for a process without rights to give up access to files (Linux 5.13 and later). Here it
forbids execution, and new folders and links, so that the own folder stays flat. Version 4 also denies TCP, and 6 sockets
and signals to others; the filter of system calls refuses these anyway. Landlock does not hide whether a known path exists,
its size and times (stat). Source: linux/landlock.h, Documentation/userspace-api/landlock.rst.
"""

import ctypes
import errno
import struct
import sysconfig
from pathlib import Path

CREATE_RULESET = 444  # the same number on every machine
WRITE_FILE, READ_FILE, READ_DIR, REMOVE_FILE, MAKE_FILE, TRUNCATE = (
    1 << 1,
    1 << 2,
    1 << 3,
    1 << 5,
    1 << 8,
    1 << 14,
)
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


def landlock_version() -> int:
    """Return the kernel's version of Landlock.

    Raises:
        OSError: the kernel has none (``ENOSYS``), or it was disabled when the machine started (``EOPNOTSUPP``).
    """
    kernel = ctypes.CDLL(None, use_errno=True)
    version: int = kernel.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    if version < 1:
        number = ctypes.get_errno() or errno.ENOSYS
        raise OSError(number, errno.errorcode.get(number, str(number)))
    return version


def file_rights(version: int) -> int:
    """Return all rights that this version can deny.

    Example:
        >>> [hex(file_rights(version)) for version in (1, 2, 3, 4, 5, 9)]
        ['0x1fff', '0x3fff', '0x7fff', '0x7fff', '0xffff', '0xffff']
    """
    return RIGHTS[max(known for known in RIGHTS if known <= version)]


def ruleset(version: int) -> bytes:
    """Return ``struct landlock_ruleset_attr``: the rights denied without a rule; newer kernels know more of its fields.

    Example:
        >>> [len(ruleset(version)) for version in (1, 4, 6)]
        [8, 16, 24]
    """
    fields = [file_rights(version)] + [TCP] * (version >= 4) + [SCOPES] * (version >= 6)
    return struct.pack(f"={len(fields)}Q", *fields)


def rules(version: int, folder: Path) -> list[tuple[str, int]]:
    """Return paths and the rights beneath them.

    Args:
        version: of Landlock.
        folder: the only folder where files may be written.
    """
    paths: list[str | Path] = [*FILES, *_standard_library(), *_shared_libraries()]
    readable = sorted({str(Path(path).resolve()) for path in paths if Path(path).exists()})
    found = [(path, READ_FILE | (READ_DIR if Path(path).is_dir() else 0)) for path in readable]
    changes = READ_FILE | WRITE_FILE | READ_DIR | REMOVE_FILE | MAKE_FILE | TRUNCATE
    return [*found, ("/dev/null", READ_FILE | WRITE_FILE), (str(folder), changes & file_rights(version))]


def _standard_library() -> list[Path]:
    """Return the entries of its folders except installed packages; the compiled part may have a folder of its own."""
    folders = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    return [entry for folder in folders for entry in _entries(Path(folder)) if entry.name not in PACKAGES]


def _shared_libraries() -> list[Path]:
    """Return what the linker loads for the compiled standard library; other programs keep their files beside it."""
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
