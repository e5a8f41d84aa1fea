import errno
import platform
import re
import struct
import sys
from pathlib import Path

import pytest

from fedlight.evaluation.sandbox import SandboxError, check_function, missing_protection, run_python
from fedlight.evaluation.sandbox.protection import CHECKED, MACHINES, seccomp_filter

ALLOWED, REFUSED, KILLED = 0x7FFF0000, 0x00050001, 0x80000000
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


def verdict(machine: str, number: int, *arguments: int, audit_arch: int | None = None) -> int:
    """What the filter says, by a machine for its instructions written from linux/filter.h."""
    arch = MACHINES[machine].audit_arch if audit_arch is None else audit_arch
    data = struct.pack("=IIQ6Q", number, arch, 0, *arguments, *[0] * (6 - len(arguments)))
    program = list(struct.iter_unpack("=HBBI", seccomp_filter(MACHINES[machine])))
    value = at = 0
    while True:
        code, if_true, if_false, constant = program[at]
        at += 1
        if code == 0x20:
            (value,) = struct.unpack_from("=I", data, constant)
        elif code == 0x54:
            value &= constant
        elif code == 0x15:
            at += if_true if value == constant else if_false
        elif code == 0x35:
            at += if_true if value >= constant else if_false
        else:
            assert code == 0x06
            return constant


@pytest.mark.parametrize("machine", MACHINES)
def test_numbers_are_the_kernels(machine: str) -> None:
    if not HEADERS[machine].exists():
        pytest.skip("the kernel's headers are not installed")
    text = HEADERS[machine].read_text()
    known = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text)}
    known.setdefault("newfstatat", known.get("fstatat", -1))
    known.setdefault("renameat", 38)
    own = MACHINES[machine].allowed | {"capset": MACHINES[machine].capset}
    assert own == {name: known[name] for name in own}


@pytest.mark.parametrize("machine", MACHINES)
def test_every_number_has_its_verdict(machine: str) -> None:
    allowed = {number for name, number in MACHINES[machine].allowed.items() if name not in CHECKED}
    checked = {number for name, number in MACHINES[machine].allowed.items() if name in CHECKED}
    for number in range(1024):
        if number not in checked:
            assert verdict(machine, number) == (ALLOWED if number in allowed else REFUSED), number
    assert verdict(machine, 0x40000000) == verdict(machine, 63, audit_arch=0x40000003) == KILLED


@pytest.mark.parametrize("machine", MACHINES)
def test_arguments_decide(machine: str) -> None:
    numbers = MACHINES[machine].allowed
    cut, write, cut_and_write = 0o1000, 0o1, 0o1001
    flags = (0, write, cut_and_write, cut, cut | 1 << 19)
    opened = [verdict(machine, numbers["openat"], 0, 0, flag) for flag in flags]
    assert opened == [ALLOWED, ALLOWED, ALLOWED, REFUSED, REFUSED]
    asked = [verdict(machine, numbers["ioctl"], 0, command) for command in (0x5401, 0x5412)]
    assert asked == [ALLOWED, REFUSED]
    controlled = [verdict(machine, numbers["fcntl"], 0, command) for command in (3, 1030, 8, 10, 1031)]
    assert controlled == [ALLOWED] * 2 + [REFUSED] * 3
    limits = [(0, 7, 0), (1, 7, 0), (0, 7, 1), (0, 7, 1 << 32)]
    assert [verdict(machine, numbers["prlimit64"], *given) for given in limits] == [ALLOWED] + [REFUSED] * 3


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSYS, "offers no Landlock"),
        (errno.EOPNOTSUPP, "left out when this machine started"),
        (errno.EPERM, "container"),
    ],
)
def test_a_kernel_without_landlock_is_refused(number, words, monkeypatch) -> None:
    def fails() -> int:
        raise OSError(number, errno.errorcode[number])

    monkeypatch.setattr("fedlight.evaluation.sandbox.protection.landlock_version", fails)
    assert words in (missing_protection() or "")
    for attempt in (lambda: run_python("print(1)"), lambda: check_function("def f(): pass", "f", "f()")):
        with pytest.raises(SandboxError, match=r"not run unprotected: .*unprotected=True") as caught:
            attempt()
        assert "\n" not in str(caught.value)


def test_other_systems_and_processors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert "and this is riscv64" in (missing_protection() or "")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "and this is darwin" in (missing_protection() or "")


def test_unprotected_code_still_has_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    code = "import os; print(os.listdir('/') != [], dict(os.environ))"
    assert run_python(code, unprotected=True).stdout == "True {}\n"
    assert run_python("x = bytearray(1 << 30)", unprotected=True).outcome == "error"
    assert check_function("def f(): return 1", "f", "assert f() == 1", unprotected=True).passed


def test_an_interpreter_that_does_not_start_is_no_failure_of_the_code(monkeypatch) -> None:
    fails = ["-c", "raise SystemExit('no libpython')"]
    monkeypatch.setattr("fedlight.evaluation.sandbox.process.FLAGS", fails)
    with pytest.raises(SandboxError, match=r"could not be entered .exit status 1.: no libpython"):
        run_python("print(1)")
