import os
import signal
import subprocess
import sys
import time

import pytest

if sys.platform == "win32":
    pytest.skip("no terminals to hang up", allow_module_level=True)
import pty

PROGRAM = """
import signal, sys, time
if "nohup" in sys.argv:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
from fedlight.support.console import one_line_errors
with one_line_errors():
    try:
        print("begun", flush=True)
        for _ in range(40):
            time.sleep(0.05)
    finally:
        if "nohup" not in sys.argv:
            print("a summary at the end", flush=True)
        with open(sys.argv[1], "w") as file:
            file.write("cleaned up")
"""


def until_hung_up(*arguments):
    """Exit code of the program whose terminal is closed once it has begun."""
    main, other = pty.openpty()
    controlled = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    command = [sys.executable, "-c", controlled + PROGRAM, *arguments]
    child = subprocess.Popen(command, stdin=other, stdout=other, stderr=other, start_new_session=True)
    os.close(other)
    assert b"begun" in os.read(main, 1000)
    time.sleep(0.3)  # until its end of the line is written as well
    os.close(main)
    return child.wait(timeout=60)


@pytest.mark.parametrize(("more", "code"), [([], 143), (["nohup"], 0)])
def test_it_stops_and_cleans_up_and_under_nohup_it_goes_on(tmp_path, more, code):
    assert until_hung_up(str(tmp_path / "end"), *more) == code
    assert (tmp_path / "end").read_text() == "cleaned up"


IMPATIENT = """
import atexit, os, signal
from fedlight.support.console import one_line_errors
atexit.register(lambda: [os.kill(os.getpid(), signum) for signum in (signal.SIGINT, signal.SIGTERM)])
with one_line_errors():
    raise KeyboardInterrupt
"""


def test_signals_while_a_stopped_program_ends_show_no_stack():
    done = subprocess.run([sys.executable, "-c", IMPATIENT], stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "fedlight: stopped\n")
    finished = IMPATIENT.replace("raise KeyboardInterrupt", "pass").replace(
        "(signal.SIGINT, signal.SIGTERM)", "[signal.SIGTERM]"
    )
    done = subprocess.run([sys.executable, "-c", finished], stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (-signal.SIGTERM, "")


LOST = """
import os, signal, sys, time, weakref
from fedlight.support.console import one_line_errors
class Thing: pass
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored below nohup
with one_line_errors():
    thing = Thing()
    reference = weakref.ref(thing, lambda _: (os.kill(os.getpid(), int(sys.argv[1])), time.sleep(0.1)))
    del thing
    time.sleep(30)
"""


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_whose_exception_python_drops_stops_the_program(signum, code):
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", LOST, str(int(signum))], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (code, "fedlight: stopped\n")
    assert time.monotonic() - begun < 20
