import os
import signal
import socket

import pytest

from fedlight.evaluation.sandbox import Limits, missing_protection, run_python

pytestmark = pytest.mark.skipif(missing_protection() is not None, reason=f"{missing_protection()}")

LIMITS = Limits(wall_seconds=120, cpu_seconds=60, memory_mib=256)  # never reached, however slow the machine
KERNEL = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"


def refused(code: str) -> bool:
    """Whether an exception for lack of rights stopped the code."""
    result = run_python(code, LIMITS)
    last = result.stderr.strip().splitlines()[-1] if result.stderr.strip() else ""
    return result.outcome == "error" and last.startswith("PermissionError: [Errno 1]")


@pytest.mark.parametrize(
    "kind",
    ["AF_INET, s.SOCK_STREAM", "AF_INET, s.SOCK_DGRAM", "AF_INET6", "AF_UNIX", "AF_NETLINK, s.SOCK_RAW"],
)
def test_there_are_no_sockets(kind: str) -> None:
    assert refused(f"import socket as s; s.socket(s.{kind})")


def test_nobody_can_be_connected_to_by_any_way() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert refused(f"import socket; socket.create_connection(('127.0.0.1', {port}))")
        # URLError around it
        assert refused(f"import urllib.request as u; u.urlopen('http://127.0.0.1:{port}')") is False
        server.settimeout(0.2)
        with pytest.raises(TimeoutError):
            server.accept()
    code = f"{KERNEL}print(libc.socket(2, 1, 0), libc.socketpair(1, 1, 0, bytes(8)), ctypes.get_errno())"
    assert run_python(code, LIMITS).stdout == "-1 -1 1\n"


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.fork()",
        "import os; os.posix_spawn('/bin/true', ['true'], {})",
        "import os; os.execv('/bin/true', ['true'])",
        "import subprocess; subprocess.run(['true'])",
        "import multiprocessing as m; p = m.get_context('fork').Process(target=print); p.start()",
        "import os; os.unshare(0x10000000)" if hasattr(os, "unshare") else "import os; os.fork()",
        "import os; os.memfd_create('x')",
        "import os; os.kill(os.getppid(), 0)",
        "import os; os.kill(os.getppid(), 9)",
        "import os; os.kill(-1, 9)",
        "import os; os.killpg(0, 9)",
        "import os; os.setuid(1)",
        "import os; os.nice(-5)",
        "import os; os.setpriority(os.PRIO_PROCESS, 0, -5)",
        "import os; os.sched_setaffinity(0, {0})",
        "import os; os.setsid()",
        "import fcntl, os; r, w = os.pipe(); fcntl.fcntl(r, fcntl.F_SETOWN, os.getppid())",
        "import fcntl; fcntl.ioctl(0, 0x5412, b'x')",
    ],
)
def test_calls_that_reach_out_are_refused(code: str) -> None:
    assert refused(code)


def test_limits_cannot_be_changed_nor_the_parents() -> None:
    code = "import resource as r\nprint(r.getrlimit(r.RLIMIT_AS)[0] >> 20)\n"
    code += "r.setrlimit(r.RLIMIT_AS, ({0}, {0}))"
    for value in (1 << 20, 1 << 40):
        result = run_python(code.format(value), LIMITS)
        assert result.stdout == "256\n"
        assert "not allowed to raise maximum limit" in result.stderr  # Python's words for EPERM
    assert refused("import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))")
    assert refused("import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_CPU)")


def test_threads_and_loops_of_forks_start_nothing() -> None:
    result = run_python("import threading; threading.Thread(target=print).start()", LIMITS)
    assert result.outcome == "error"
    assert "can't start new thread" in result.stderr
    code = """if True:
        import os
        refused = 0
        for _ in range(50):
            try:
                if os.fork() == 0:
                    os._exit(0)
            except PermissionError:
                refused += 1
        print(refused)"""
    assert run_python(code, LIMITS).stdout == "50\n"


@pytest.mark.parametrize("number", [57, 58, 56, 435, 41, 101, 310, 321, 425, 304, 319, 434])
def test_by_number(number: int) -> None:
    """fork, vfork, clone, clone3, socket, ptrace, process_vm_readv, bpf, io_uring_setup, open_by_handle_at, memfd, pidfd."""
    if os.uname().machine != "x86_64":
        pytest.skip("numbers of x86_64")
    code = f"{KERNEL}print(libc.syscall({number}, 0, 0, 0, 0), ctypes.get_errno())"
    assert run_python(code, LIMITS).stdout == "-1 1\n"


def test_the_numbers_of_another_instruction_set_kill() -> None:
    """x32: the same processor, other numbers, which a filter by number alone would let through."""
    if os.uname().machine != "x86_64":
        pytest.skip("only x86_64 has x32")
    result = run_python(f"{KERNEL}libc.syscall({0x40000000 + 57})\nprint('alive')", LIMITS)
    assert (result.outcome, result.status, result.stdout) == ("exited", -signal.SIGSYS, "")


def test_what_root_may_do_is_refused_to_root() -> None:
    calls = ["os.setgroups([])", "time.clock_settime(0, 0)"]
    calls += ["socket.sethostname('x')", "os.setresuid(1, 1, 1)"]
    for code in calls:
        assert refused(f"import os, socket, time; {code}"), code
