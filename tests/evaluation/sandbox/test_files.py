import importlib.util
import os
import sysconfig
from contextlib import ExitStack
from operator import attrgetter
from pathlib import Path

import pytest

from fedlight.evaluation.sandbox import Limits, missing_protection, run_python

pytestmark = pytest.mark.skipif(missing_protection() is not None, reason=f"{missing_protection()}")

LIMITS = Limits(wall_seconds=120, cpu_seconds=60, memory_mib=256)  # never reached, however slow the machine
KERNEL = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"


def refusal(code: str) -> str:
    """The last line of the code's errors, after it was stopped by an exception."""
    result = run_python(code, LIMITS)
    assert result.outcome == "error", result
    return result.stderr.strip().splitlines()[-1]


def test_the_own_folder_can_be_written_read_and_emptied() -> None:
    code = """if True:
        import os
        with open("a.txt", "w") as file: file.write("kept")
        os.rename("a.txt", "b.txt")
        print(open("b.txt").read(), os.listdir("."))
        os.remove("b.txt")
        print(os.listdir("."), os.getcwd().startswith("/"))"""
    result = run_python(code, LIMITS)
    assert (result.outcome, result.stdout) == ("finished", "kept ['b.txt']\n[] True\n"), result


def test_the_standard_library_can_be_imported_after_the_lock() -> None:
    code = """if True:
        import asyncio, bz2, collections, dataclasses, decimal, hashlib, heapq, itertools, json, lzma, math, random, re
        import sqlite3, ssl, statistics, string, typing, unittest, zlib
        @dataclasses.dataclass
        class Point:
            x: int
        print(Point(3), hashlib.md5(b"abc").hexdigest())"""
    assert run_python(code, LIMITS).stdout == "Point(x=3) 900150983cd24fb0d6963f7d28e17f72\n"


def test_no_packages_and_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_PARENT", "x")
    assert "No module named 'numpy'" in refusal("import numpy")
    assert "No module named 'fedlight'" in refusal("import fedlight")
    assert run_python("import os; print(dict(os.environ))", LIMITS).stdout == "{}\n"


def folders_of_packages() -> list[str]:
    """Where packages are installed: here, in the interpreter that a virtual environment goes by, and by the system."""
    own = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    base = [str(Path(sysconfig.get_path(name)) / "site-packages") for name in ("stdlib", "platstdlib")]
    system = [str(path) for path in Path("/usr/lib").glob("python3*/dist-packages")]
    return sorted({folder for folder in (*own, *base, *system) if Path(folder).is_dir()})


@pytest.mark.parametrize("folder", folders_of_packages())
def test_installed_packages_cannot_be_read(folder: str) -> None:
    assert refusal(f"import os; os.listdir({folder!r})").startswith("PermissionError: [Errno 13]")
    file = next((path for path in Path(folder).rglob("*.py")), None)
    if file is not None:
        assert refusal(f"open({str(file)!r}).read()").startswith("PermissionError: [Errno 13]")


@pytest.mark.parametrize("package", ["numpy", "torch", "pip", "fedlight"])
def test_installed_packages_cannot_be_imported_from_where_they_are(package: str) -> None:
    """The code knows the folders and puts them on its path; it may also load the file of a package by itself."""
    spec = importlib.util.find_spec(package)
    places = [*folders_of_packages(), str(Path(spec.origin).parents[1])] if spec and spec.origin else []
    last = refusal(f"import sys; sys.path += {places!r}; import {package}")
    assert last == f"ModuleNotFoundError: No module named '{package}'"
    if spec and spec.origin:
        load = f"SourceFileLoader({package!r}, {spec.origin!r}).load_module()"
        assert "PermissionError" in refusal(f"from importlib.machinery import SourceFileLoader; {load}")


def test_programs_beside_the_libraries_cannot_be_read() -> None:
    """Such as ``/usr/lib/apt/methods/http``: only shared libraries are for the linker."""
    beside = [path for path in Path("/usr/lib").glob("*/*") if path.is_file() and not path.is_symlink()]
    own = {"glibc-hwcaps", "ossl-modules", str(sysconfig.get_config_var("MULTIARCH"))}
    others = [path for path in beside if path.parent.name not in own and "python" not in path.parent.name]
    if not others:
        pytest.skip("nothing but libraries here")
    assert refusal(f"open({str(others[0])!r}, 'rb').read()").startswith("PermissionError")


@pytest.mark.parametrize(
    "path",
    [
        *("/etc/passwd", "/proc/self/environ", "/proc/self/status"),
        *("/sys/kernel/mm/transparent_hugepage/enabled", "/dev/mem"),
    ],
)
def test_files_of_the_system_cannot_be_read(path: str) -> None:
    if not Path(path).exists():
        pytest.skip(f"no {path} here")
    assert refusal(f"open({path!r}).read()").startswith("PermissionError: [Errno 13]")


@pytest.mark.parametrize("folder", ["/", "/etc", "/proc", "/tmp", "/home", "..", str(Path.home())])
def test_folders_of_the_system_cannot_be_listed(folder: str) -> None:
    assert refusal(f"import os; os.listdir({folder!r})").startswith("PermissionError: [Errno 13]")


def test_files_of_the_caller_cannot_be_touched(tmp_path: Path) -> None:
    own = tmp_path / "own.txt"
    own.write_text("secret")
    own.chmod(0o666)
    kept = attrgetter("st_mode", "st_mtime_ns", "st_uid")
    before = kept(own.stat())
    for attempt in (
        *(f"open({str(own)!r}).read()", f"open({str(own)!r}, 'w')", f"open({str(own)!r}, 'a')"),
        *(f"open({str(tmp_path / 'new.txt')!r}, 'w')", f"import os; os.remove({str(own)!r})"),
        f"import os; os.rename({str(own)!r}, 'taken')",
        f"import os; open('b', 'w'); os.rename('b', {str(own)!r})",
        f"import os; os.truncate({str(own)!r}, 0)",
        f"import os; os.open({str(own)!r}, os.O_RDONLY | os.O_TRUNC)",
        *(f"import os; os.chmod({str(own)!r}, 0)", f"import os; os.chown({str(own)!r}, 1, 1)"),
        f"import os; os.utime({str(own)!r}, (0, 0))",
        f"import os; os.setxattr({str(own)!r}, 'user.x', b'x')",
        *(f"import os; os.link({str(own)!r}, 'taken')", f"import os; os.rmdir({str(tmp_path)!r})"),
        *(f"import os; os.chdir({str(tmp_path)!r})", f"import os; os.chroot({str(tmp_path)!r})"),
    ):
        assert refusal(attempt).startswith(("PermissionError", "OSError: [Errno 18]")), attempt
    assert kept(own.stat()) == before
    assert own.read_text() == "secret"
    assert os.listdir(tmp_path) == ["own.txt"]


def test_no_links_can_be_made_and_one_that_lies_in_the_folder_leads_nowhere(tmp_path) -> None:
    for attempt in (
        *("symlink('/etc/passwd', 'a')", "mkdir('a')", "mkfifo('a')", "mknod('a')"),
        "link('/etc/passwd', 'a')",
    ):
        assert refusal(f"import os; os.{attempt}").startswith("PermissionError"), attempt
    """As if the code had got one made: rules hold for where a link leads."""
    link = tmp_path / "link"
    link.symlink_to("/etc/passwd")
    assert refusal(f"open({str(link)!r}).read()").startswith("PermissionError")


@pytest.mark.parametrize(
    "call",
    [
        "open(b'/etc/passwd', 0)",
        "openat(-100, b'/etc/passwd', 0)",
        "syscall(437, -100, b'/etc/passwd', bytes(24), 24)",
    ],
)
def test_the_kernel_itself_refuses_not_only_python(call: str) -> None:
    result = run_python(f"{KERNEL}print(libc.{call}, ctypes.get_errno() in (1, 13))", LIMITS)
    assert result.stdout == "-1 True\n"


IS_OPEN = """
import os, sys
def is_open(number):
    try: os.fstat(number)
    except OSError: return False
    return True
"""


@pytest.mark.parametrize("held", [0, 100])
def test_nothing_is_inherited_and_the_order_is_gone(held: int) -> None:
    """Only the three streams and the pipe to report on are open, and standard input is empty.

    The pipe keeps the number that it has here, which is high where many files are open.
    """
    code = f"{IS_OPEN}opened = [n for n in range(65536) if is_open(n)]\nprint(opened[:3], len(opened), sys.stdin.read())"
    with ExitStack() as files:
        for _ in range(held):
            files.enter_context(open(os.devnull))
        result = run_python(code, LIMITS)
    assert result.stdout == "[0, 1, 2] 4 \n", result


def test_the_folder_is_gone_afterwards() -> None:
    result = run_python("import os; open('left', 'w'); print(os.getcwd())", LIMITS)
    assert result.outcome == "finished"
    assert not Path(result.stdout.strip()).exists()
