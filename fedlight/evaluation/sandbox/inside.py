"""First program in a process of the sandbox: gives up every right, checks that, and runs the code.

A script for ``python -s -P -S``: it imports only the standard library, and its order comes as JSON through standard input.
"""

import ctypes
import json
import os
import random
import resource
import signal
import struct
import sys
import traceback
import types
from typing import Any, NoReturn

SET_DEATH_SIGNAL, SET_DUMPABLE, SET_SECCOMP, NO_NEW_PRIVILEGES = 1, 4, 22, 38  # linux/prctl.h
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
CAPABILITIES_VERSION = 0x20080522
CANNOT_START = 97  # exit status


class Locked:
    """System calls by number, with each failure as an ``OSError`` that names the call."""

    def __init__(self) -> None:
        self.kernel = ctypes.CDLL(None, use_errno=True)

    def prctl(self, *arguments: int) -> None:
        """Change an attribute of this process."""
        self._check(
            self.kernel.prctl(*(ctypes.c_ulong(value) for value in arguments)), f"prctl {arguments[0]}"
        )

    def syscall(self, number: int, *arguments: Any) -> int:
        """Make a system call; integers are passed in full width."""
        wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
        return self._check(self.kernel.syscall(ctypes.c_long(number), *wide), f"system call {number}")

    def _check(self, returned: int, what: str) -> int:
        if returned < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{what}: {os.strerror(number)}")
        return returned

    def landlock(self, ruleset: bytes, rules: list[tuple[str, int]]) -> None:
        """Allow only files under the rules from now on."""
        attributes = ctypes.create_string_buffer(ruleset, len(ruleset))
        handle = self.syscall(CREATE_RULESET, attributes, len(ruleset), 0)
        for path, rights in rules:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rule = struct.pack("=Qi", rights, place)
            self.syscall(ADD_RULE, handle, 1, ctypes.create_string_buffer(rule, len(rule)), 0)
            os.close(place)
        self.syscall(RESTRICT_SELF, handle, 0)
        os.close(handle)

    def drop_capabilities(self, number: int) -> None:
        """Give up all capabilities, so that root here has no more rights than any user."""
        # Version 3 has two structs of three 32-bit sets: all empty.
        self.syscall(number, struct.pack("=Ii", CAPABILITIES_VERSION, 0), bytes(24))

    def filter(self, program: bytes) -> None:
        """Install the filter of system calls."""
        held = ctypes.create_string_buffer(program, len(program))
        # struct sock_fprog: number of instructions of 8 bytes, padding, pointer.
        header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(held))
        address = ctypes.create_string_buffer(header, len(header))
        self.prctl(SET_SECCOMP, 2, ctypes.addressof(address))


def limit(limits: dict[str, int], strict: bool) -> None:
    """Set the kernel's limits on this process, which it can no longer raise."""
    mib = 1 << 20
    wanted = {
        resource.RLIMIT_CPU: (limits["cpu_seconds"], limits["cpu_seconds"] + 1),  # SIGXCPU, then SIGKILL
        resource.RLIMIT_AS: (limits["memory_mib"] * mib,) * 2,
        resource.RLIMIT_FSIZE: (limits["file_mib"] * mib,) * 2,
        resource.RLIMIT_NOFILE: (limits["open_files"],) * 2,
        resource.RLIMIT_CORE: (0, 0),
    }
    for kind, soft_and_hard in wanted.items():
        try:
            resource.setrlimit(kind, soft_and_hard)
        except (OSError, ValueError):  # macOS has no limit on the address space
            if strict:
                raise


def lock(order: dict[str, Any]) -> None:
    """Give up all rights and check that they are gone."""
    kernel = Locked()
    kernel.prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != order["parent"]:  # it ended before the signal was set
        raise OSError("the process that started this one is gone")
    kernel.prctl(SET_DUMPABLE, 0)  # other processes of the user cannot trace it
    # Without root, Landlock and seccomp require this. Steps that need rights come first, the filter last.
    kernel.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    kernel.landlock(bytes.fromhex(order["ruleset"]), order["rules"])
    kernel.drop_capabilities(order["capset"])
    limit(order["limits"], strict=True)
    kernel.filter(bytes.fromhex(order["filter"]))
    # A file outside of the rules, which Landlock refuses, and a signal, which the filter refuses.
    for attempt in (lambda: os.open("/", os.O_RDONLY), lambda: os.kill(os.getpid(), 0)):
        try:
            attempt()
        except PermissionError:
            continue
        raise OSError("the kernel accepted the rules and does not follow them")


def run(order: dict[str, Any]) -> NoReturn:
    """Run the modules and the code, report if the end was reached, and end the process."""
    random.seed(0)  # PYTHONHASHSEED fixes the order of sets: the same code has the same outcome
    try:
        for name, source in order["modules"].items():
            _execute(name, source)
        _execute(order["name"], order["code"])
    except BaseException:  # also SystemExit: tests that were not reached did not pass
        traceback.print_exc()
        _leave(1)
    _flush()
    os.write(order["status"], order["token"].encode())
    os._exit(0)


def _execute(name: str, source: str) -> None:
    module = types.ModuleType(name)
    sys.modules[name] = module  # dataclasses and pickle look there
    exec(compile(source, f"<{name}>", "exec"), module.__dict__)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):  # the code closed or replaced it
            continue


def _leave(status: int) -> NoReturn:
    _flush()
    os._exit(status)


def main() -> NoReturn:
    """Read the order, lock the process and run the code."""
    order = json.load(sys.stdin)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)  # the order holds the token
    os.close(nothing)
    os.environ.clear()
    try:
        if order["protected"]:
            lock(order)
        else:
            limit(order["limits"], strict=False)
        os.write(order["status"], b"locked\n")
    except OSError as error:
        print(error, file=sys.stderr)
        _leave(CANNOT_START)
    run(order)


if __name__ == "__main__":
    main()
