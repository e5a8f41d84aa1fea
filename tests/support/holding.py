"""A process of its own that works in a folder until it is killed."""

import os
import signal
from contextlib import ExitStack, contextmanager

kept = ExitStack()


def stay_in(context):
    """Enters a context that is left when the process ends."""
    return lambda: kept.enter_context(context)


@contextmanager
def in_another_process(work):
    """Forks, has the child do ``work()`` and say so, and keeps it alive while the block runs; the child's number."""
    told, tells = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work()
            os.write(tells, b"x")
            signal.pause()
        finally:
            os._exit(1)
    os.close(tells)
    try:
        assert os.read(told, 1) == b"x"
        yield child
    finally:
        end(child)
        os.close(told)


def end(child):
    """Kills it at once; a second time does nothing."""
    try:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    except (ProcessLookupError, ChildProcessError):
        pass
