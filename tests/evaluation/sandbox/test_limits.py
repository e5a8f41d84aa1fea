import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fedlight.evaluation.sandbox import Limits, missing_protection, run_python

pytestmark = pytest.mark.skipif(missing_protection() is not None, reason=f"{missing_protection()}")

LIMITS = Limits(wall_seconds=120, cpu_seconds=60, memory_mib=256)  # never reached, however slow the machine
PROCESSOR = Limits(wall_seconds=120, cpu_seconds=1, memory_mib=256)
CLOCK = Limits(wall_seconds=0.4, cpu_seconds=60, memory_mib=256)
CLAIMS = """
import os
for n in range(1, 32):
    try: os.write(n, b"locked\\n" + b"0" * 32)
    except OSError: pass
"""


def test_a_loop_without_end_is_stopped_by_the_processors_clock() -> None:
    result = run_python("while True: pass", PROCESSOR)
    assert (result.outcome, result.status) == ("timeout", -signal.SIGXCPU)


@pytest.mark.parametrize(
    "code",
    [
        "import time; time.sleep(60)",
        "import signal, time\nfor s in (15, 2, 1, 24, 14): signal.signal(s, signal.SIG_IGN)\ntime.sleep(60)",
        "import os, time; os.close(1); os.close(2); time.sleep(60)",
        "import os, time\nfor n in range(3, 32):\n    try: os.close(n)\n    except OSError: pass\ntime.sleep(60)",
        "import select; select.select([], [], [])",
    ],
)
def test_code_that_waits_is_killed_by_the_clock(code: str) -> None:
    result = run_python(code, CLOCK)
    assert (result.outcome, result.status) == ("timeout", -signal.SIGKILL)
    assert 0.4 <= result.seconds < 30  # the code would wait for 60


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("x = bytearray(1 << 30)", "MemoryError"),
        ("import mmap; mmap.mmap(-1, 1 << 30)", "Cannot allocate memory"),
        ("x = []\nwhile True: x.append(bytearray(1 << 20))", "MemoryError"),
        ("f = open('x', 'wb', 0)\nfor _ in range(3): f.write(bytes(1 << 20))", "File too large"),
        ("x = [open('a', 'w') for _ in range(40)]", "Too many open files"),
        ("input()", "EOFError"),
    ],
)
def test_what_is_above_a_limit_is_refused_and_input_is_empty(code: str, words: str) -> None:
    result = run_python(code, LIMITS)
    assert result.outcome == "error"
    assert words in result.stderr


def test_output_is_cut_off_never_blocks_and_is_kept_as_far_as_it_is_text() -> None:
    limits = Limits(wall_seconds=120, cpu_seconds=60, memory_mib=256, output_kib=2)
    result = run_python("import sys\nprint('a' * 3_000_000)\nprint('b' * 3_000_000, file=sys.stderr)", limits)
    assert (result.outcome, result.stdout, result.stderr) == ("finished", "a" * 2048, "b" * 2048)
    assert run_python(r"import os; os.write(1, b'\xff\x00ok')", LIMITS).stdout == "\ufffd\x00ok"


@pytest.mark.slow
def test_output_without_end_ends() -> None:
    result = run_python("while True: print('x' * 1000)", PROCESSOR)
    assert result.outcome == "timeout"
    assert result.stdout.startswith("xxx")


def test_many_files_end_the_process() -> None:
    limits = Limits(wall_seconds=120, cpu_seconds=60, memory_mib=256, files=4)
    many = "import time\nfor i in range({}): open(str(i), 'w').close()\ntime.sleep({})"
    assert run_python(many.format(5, 60), limits).outcome == "files"  # ended while it sleeps
    assert run_python(many.format(4, 0.1), limits).outcome == "finished"


@pytest.mark.parametrize(
    ("code", "outcome", "status"),
    [
        ("import os; os._exit(0)", "exited", 0),
        ("import os; os._exit(3)", "exited", 3),
        ("import sys; sys.exit(0)", "error", 1),
        ("raise SystemExit", "error", 1),
        ("raise KeyboardInterrupt", "error", 1),
        ("1 / 0", "error", 1),
        ("this is no Python", "error", 1),
        ("x = '\\ud800'.encode()", "error", 1),
        ("import ctypes; ctypes.string_at(0)", "exited", -signal.SIGSEGV),
        ("print('locked'); import os; os.write(1, b'finished'); os._exit(0)", "exited", 0),
        (f"{CLAIMS}os._exit(0)", "exited", 0),
        ("import builtins\nfor n in list(vars(builtins)): delattr(builtins, n)\nprint(1)", "error", 1),
        ("import sys\nsys.stdout = sys.stderr = None\nx = 1", "finished", 0),
        ("import sys\nsys.stdout.close()\nsys.stderr.close()", "finished", 0),
        ("def f(n): return f(n + 1)\nf(0)", "error", 1),
        ("import atexit; atexit.register(print, 'late')", "finished", 0),
        ("", "finished", 0),
    ],
)
def test_ends_of_every_kind(code: str, outcome: str, status: int) -> None:
    result = run_python(code, LIMITS)
    assert (result.outcome, result.status) == (outcome, status), result


def test_the_same_code_prints_the_same_twice_and_deep_code_does_not_hang() -> None:
    code = "import random\nprint(random.random(), list({'a', 'b', 'c', 'd', 'e', 'f'}), hash('x'))"
    assert run_python(code, LIMITS).stdout == run_python(code, LIMITS).stdout != ""
    assert run_python("(" * 100_000 + ")" * 100_000, LIMITS).outcome in ("error", "exited")


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    opened = len(os.listdir("/proc/self/fd"))
    for code in ("open('x', 'w')", "while True: pass", "import os; os._exit(1)"):
        run_python(code, CLOCK)
    assert os.listdir(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == opened
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_limits_out_of_range_are_refused() -> None:
    wrong = {"wall_seconds": (0, math.nan), "cpu_seconds": (0, 2.5), "memory_mib": (8,), "file_mib": (0,)}
    wrong |= {"files": (-1,), "open_files": (4, "20"), "output_kib": (0, 1.5)}
    for setting, value in ((setting, value) for setting, values in wrong.items() for value in values):
        with pytest.raises(ValueError, match=f"{setting}={value!r}"):
            Limits(**{setting: value})


def test_code_dies_with_whoever_started_it(tmp_path: Path) -> None:
    """The caller is killed, so that it cannot clean up; the kernel then kills what it had started."""
    started = tmp_path / "started"
    caller = f"""
import sys, pathlib
from fedlight.evaluation.sandbox import process, run_python
start = process.SandboxedProcess._start
def noted(self, *arguments):
    found = start(self, *arguments)
    pathlib.Path({str(started)!r}).write_text(str(found.pid))
    return found
process.SandboxedProcess._start = noted
run_python("import time; print('on', flush=True); time.sleep(60)")
"""
    here = {"cwd": Path(__file__).parents[3], "env": {**os.environ, "TMPDIR": str(tmp_path)}}
    with subprocess.Popen([sys.executable, "-c", caller], **here) as running:
        wait_until(lambda: started.exists() and started.read_text() != "", seconds=120)
        pid = int(started.read_text())
        wait_until(lambda: b"inside.py" in Path(f"/proc/{pid}/cmdline").read_bytes(), seconds=120)
        running.kill()
    wait_until(lambda: not alive(pid), seconds=120)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(happened: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.02)
