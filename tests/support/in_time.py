"""A block that fails after some seconds, for what would wait for ever."""

import signal
from contextlib import contextmanager


@contextmanager
def in_time(seconds=20):
    def stop(*_):
        raise AssertionError(f"it took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
