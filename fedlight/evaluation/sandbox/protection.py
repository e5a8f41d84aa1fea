"""Protection from a process: the means of this machine, and the order that makes a process lock itself.

Landlock bounds the files: the libraries for reading, the process's own folder for reading and writing. The standard
library's folder itself cannot be listed, or its packages could be; imports use the listing that the interpreter took before
it was locked.

Landlock is the kernel's means for a process without rights to give up access to files (Linux 5.13 and later). Here it
forbids execution, and new folders and links, so that the own folder stays flat. Version 4 also denies TCP, and 6
sockets and signals to others; the filter of system calls refuses these anyway. Landlock does not hide whether a known
path exists, its size and times (stat). Source: linux/landlock.h, Documentation/userspace-api/landlock.rst.

The filter of system calls is a program for the kernel (seccomp-bpf). A refused call fails with EPERM, so code gets
``PermissionError``; one of another instruction set kills the process. A list of allowed calls stays right when kernels get
new ones. Not on it, and so refused: processes and threads (fork, clone, execve), sockets of every kind, signals to any
process, changes of owner, mode, times or limits, mounts, namespaces, io_uring, keys, bpf, ptrace, memfd (memory that no
limit counts), links and folders. Source: linux/seccomp.h, linux/filter.h, Documentation/userspace-api/seccomp_filter.rst.
"""

import ctypes
import errno
import platform
import struct
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

from fedlight.evaluation.sandbox.process import SandboxError

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
CHECKED = ["open", "openat", "ioctl", "fcntl", "prlimit64"]  # allowed with some arguments only
_X86_64 = """
    read 0 write 1 open 2 close 3 stat 4 fstat 5 lstat 6 poll 7 lseek 8 mmap 9 mprotect 10 munmap 11 brk 12 rt_sigaction 13
    rt_sigprocmask 14 rt_sigreturn 15 ioctl 16 pread64 17 pwrite64 18 readv 19 writev 20 access 21 pipe 22 select 23
    sched_yield 24 mremap 25 madvise 28 dup 32 dup2 33 nanosleep 35 getitimer 36 alarm 37 setitimer 38 getpid 39 sendfile 40
    exit 60 uname 63 fcntl 72 fsync 74 fdatasync 75 ftruncate 77 getcwd 79 rename 82 unlink 87 gettimeofday 96 getrlimit 97
    getrusage 98 sysinfo 99 times 100 getuid 102 getgid 104 geteuid 107 getegid 108 getppid 110 getpgrp 111 getgroups 115
    rt_sigpending 127 sigaltstack 131 gettid 186 time 201 futex 202 sched_getaffinity 204 getdents64 217 restart_syscall 219
    clock_gettime 228 clock_getres 229 clock_nanosleep 230 exit_group 231 openat 257 newfstatat 262 unlinkat 263 renameat 264
    faccessat 269 pselect6 270 ppoll 271 dup3 292 pipe2 293 prlimit64 302 renameat2 316 getrandom 318 copy_file_range 326
    statx 332 close_range 436 faccessat2 439
"""
_AARCH64 = """
    getcwd 17 dup 23 dup3 24 fcntl 25 ioctl 29 unlinkat 35 renameat 38 ftruncate 46 faccessat 48 openat 56 close 57 pipe2 59
    getdents64 61 lseek 62 read 63 write 64 readv 65 writev 66 pread64 67 pwrite64 68 sendfile 71 pselect6 72 ppoll 73
    newfstatat 79 fstat 80 fsync 82 fdatasync 83 exit 93 exit_group 94 futex 98 nanosleep 101 getitimer 102 setitimer 103
    clock_gettime 113 clock_getres 114 clock_nanosleep 115 sched_getaffinity 123 sched_yield 124 restart_syscall 128
    sigaltstack 132 rt_sigaction 134 rt_sigprocmask 135 rt_sigpending 136 rt_sigreturn 139 times 153 getgroups 158 uname 160
    getrlimit 163 getrusage 165 gettimeofday 169 getpid 172 getppid 173 getuid 174 geteuid 175 getgid 176 getegid 177
    gettid 178 sysinfo 179 brk 214 munmap 215 mremap 216 mmap 222 mprotect 226 madvise 233 prlimit64 261 renameat2 276
    getrandom 278 copy_file_range 285 statx 291 close_range 436 faccessat2 439
"""


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


class Machine(NamedTuple):
    """Processor architecture with its system calls."""

    audit_arch: int  # ``AUDIT_ARCH_*`` of linux/audit.h
    # name -> number of the allowed system calls, those of `CHECKED` with some arguments only
    allowed: dict[str, int]
    capset: int  # number of the system call that gives up capabilities


def _numbers(table: str) -> dict[str, int]:
    words = table.split()
    return {name: int(number) for name, number in zip(words[::2], words[1::2], strict=True)}


MACHINES = {
    "x86_64": Machine(0xC000003E, _numbers(_X86_64), capset=126),
    "aarch64": Machine(0xC00000B7, _numbers(_AARCH64), capset=91),
}

# BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_JMP|JGE|K, BPF_ALU|AND|K, BPF_RET|K
LOAD, JUMP_EQUAL, JUMP_FROM, AND, RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050001, 0x80000000  # RET_ALLOW, RET_ERRNO with EPERM, RET_KILL_PROCESS
X32 = 0x40000000  # the bit of x32's numbers

TERMINAL_COMMANDS = [0x5401, 0x5450, 0x5451]  # TCGETS (isatty), FIONCLEX, FIOCLEX
# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC; not F_SETOWN, which has the kernel send signals to others
FILE_COMMANDS = [0, 1, 2, 3, 4, 1030]
O_TRUNC, O_ACCMODE = 0o1000, 0o3

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant: struct sock_filter


def seccomp_filter(machine: Machine) -> bytes:
    """Return the program that allows the calls of `machine`, as an array of ``struct sock_filter``."""
    program: list[Instruction] = [
        # Calls of another instruction set (32 bits, x32) have numbers with other meanings.
        (LOAD, 0, 0, ARCHITECTURE),
        (JUMP_EQUAL, 1, 0, machine.audit_arch),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        (JUMP_FROM, 0, 1, X32),
        (RETURN, 0, 0, KILL),
    ]
    for name, number in machine.allowed.items():
        block = _checks(name) if name in CHECKED else [(RETURN, 0, 0, ALLOW)]
        program += [(JUMP_EQUAL, 0, len(block), number), *block]
    program.append((RETURN, 0, 0, REFUSE))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _checks(name: str) -> list[Instruction]:
    if name in ("open", "openat"):
        return _check_open(flags=1 if name == "open" else 2)
    if name == "prlimit64":
        return _check_prlimit()
    return _check_command(TERMINAL_COMMANDS if name == "ioctl" else FILE_COMMANDS)


def _check_open(flags: int) -> list[Instruction]:
    """Refuse to truncate a file that is opened for reading: before its version 3 Landlock would allow that."""
    return [
        (LOAD, 0, 0, _low(flags)),
        (AND, 0, 0, O_TRUNC | O_ACCMODE),
        (JUMP_EQUAL, 0, 1, O_TRUNC),
        (RETURN, 0, 0, REFUSE),
        (RETURN, 0, 0, ALLOW),
    ]


def _check_prlimit() -> list[Instruction]:
    """Allow to read the own limits: prlimit64(pid, resource, new, old) with pid 0, oneself, and new NULL."""
    return [
        *((LOAD, 0, 0, _low(0)), (JUMP_EQUAL, 1, 0, 0), (RETURN, 0, 0, REFUSE)),
        *((LOAD, 0, 0, _low(2)), (JUMP_EQUAL, 1, 0, 0), (RETURN, 0, 0, REFUSE)),
        *((LOAD, 0, 0, _low(2) + 4), (JUMP_EQUAL, 1, 0, 0), (RETURN, 0, 0, REFUSE)),  # the upper half
        (RETURN, 0, 0, ALLOW),
    ]


def _check_command(commands: list[int]) -> list[Instruction]:
    """Allow calls whose second argument, an int, is one of these."""
    tests = [part for command in commands for part in ((JUMP_EQUAL, 0, 1, command), (RETURN, 0, 0, ALLOW))]
    return [(LOAD, 0, 0, _low(1)), *tests, (RETURN, 0, 0, REFUSE)]


def _low(argument: int) -> int:
    return ARGUMENTS + 8 * argument
