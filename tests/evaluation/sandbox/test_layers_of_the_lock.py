import subprocess
import sys
from pathlib import Path

import pytest

from fedlight.evaluation.sandbox import missing_protection
from fedlight.evaluation.sandbox.process import INSIDE
from fedlight.evaluation.sandbox.protection import file_rights, landlock_version, protection

pytestmark = pytest.mark.skipif(missing_protection() is not None, reason=f"{missing_protection()}")

START = f"""
import os, socket, sys
sys.path.insert(0, {str(INSIDE.parent)!r})
from inside import NO_NEW_PRIVILEGES, Locked
def attempt(what):
    try: return str(what())
    except OSError as error: return f"refused {{error.errno}}"
kernel = Locked()
kernel.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
"""


def printed(code: str) -> str:
    command = [sys.executable, "-I", "-S", "-c", START + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_landlock_alone_keeps_files_programs_and_tcp_away(tmp_path: Path) -> None:
    order = protection(tmp_path)
    (tmp_path / "program").write_text("#!/bin/sh\n")
    (tmp_path / "program").chmod(0o755)
    found = printed(f"""
kernel.landlock(bytes.fromhex({order["ruleset"]!r}), {order["rules"]!r})
print(attempt(lambda: open("/etc/passwd")), attempt(lambda: os.mkdir({str(tmp_path / "a")!r})))
print(attempt(lambda: os.execv("/bin/sh", ["sh"])), attempt(lambda: os.execv({str(tmp_path / "program")!r}, ["x"])))
print(attempt(lambda: open({str(tmp_path / "b")!r}, "w").write("x")))
print(attempt(lambda: socket.create_connection(("127.0.0.1", 9))))
""")
    tcp = "refused 13" if landlock_version() >= 4 else "refused 111"
    assert found == f"refused 13 refused 13\nrefused 13 refused 13\n1\n{tcp}\n"


def test_the_filter_alone_keeps_the_system_away(tmp_path: Path) -> None:
    order = protection(tmp_path)
    found = printed(f"""
kernel.filter(bytes.fromhex({order["filter"]!r}))
print(attempt(lambda: len(open("/etc/passwd").read()) > 0), attempt(os.fork), attempt(socket.socket))
print(attempt(lambda: os.kill(os.getppid(), 0)), attempt(lambda: os.chmod({str(tmp_path)!r}, 0)))
print(attempt(lambda: os.open("/dev/null", os.O_RDONLY | os.O_TRUNC)))
print(attempt(lambda: os.open("/dev/null", os.O_WRONLY) > 0))
""")
    assert found == "True refused 1 refused 1\nrefused 1 refused 1\nrefused 1\nTrue\n"


def test_capabilities_are_gone(tmp_path: Path) -> None:
    found = printed(f"""
kernel.drop_capabilities({protection(tmp_path)["capset"]})
print(*[line for line in open("/proc/self/status") if line.startswith(("CapEff", "CapPrm", "CapInh"))], sep="")
""")
    assert [line.split()[1] for line in found.splitlines() if line] == ["0" * 16] * 3


def test_a_kernel_that_does_not_follow_is_noticed(tmp_path: Path) -> None:
    """Rules under which everything is allowed: the process refuses to go on."""
    order = {**protection(tmp_path), "rules": [("/", file_rights(landlock_version()))]}
    limits = {"cpu_seconds": 60, "memory_mib": 256, "file_mib": 1, "open_files": 32}
    found = printed(f"""
from inside import lock
try: lock({{**{order!r}, "limits": {limits!r}, "parent": os.getppid()}})
except OSError as error: print(error)
""")
    assert found == "the kernel accepted the rules and does not follow them\n"
