"""What a command prints besides its results: one clear line for what a user can mend and for Ctrl-C, no chatter."""

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from fedlight.support.quiet_logs import quiet_logs


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Ends the program with the message of a bad setting, file or checkpoint instead of its stack.

    ``FEDLIGHT_TRACEBACK=1`` in the environment shows the stack. A Ctrl-C ends it with exit code 130, and so does
    SIGTERM, at which Lightning would end with exit code 0, or go on until the stage is over. Notices of the libraries
    beneath on which nobody could act are left out.
    """
    signal.signal(signal.SIGTERM, _stop)
    try:
        with quiet_logs():
            yield
    except KeyboardInterrupt as stop:
        print(f"fedlight: stopped {stop}".rstrip(), file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        raise
    except Exception as error:
        if os.environ.get("FEDLIGHT_TRACEBACK") or not _can_be_mended(error):
            raise
        sys.exit(f"fedlight: {_said(error)}\n(FEDLIGHT_TRACEBACK=1 shows where)")


@contextmanager
def quiet_when_unread() -> Iterator[None]:
    """Ends without a word where the reader of the output has left, as ``fedlight --help | head -1`` does.

    The exit code is 141, that of a program which SIGPIPE ends.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        with suppress(OSError, ValueError):  # Python would flush once more at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)


class OneLineArguments(argparse.ArgumentParser):
    """Says in one line what is wrong with a command's arguments, without its usage before it."""

    def error(self, message: str) -> NoReturn:
        """Ends the program with exit code 2."""
        print(f"{self.prog.split()[0]}: {message}; see {self.prog} --help", file=sys.stderr)
        sys.exit(2)


def _said(error: Exception) -> str:
    """The message of an error in one line; the system's own about a file with its path first, and what helps."""
    if isinstance(error, OSError) and error.filename and str(error).startswith("[Errno"):
        return f"{error.filename}: {error.strerror}; check the path and who may read and write there, or give another"
    return " ".join(str(error).split()) or type(error).__name__


def _stop(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _can_be_mended(error: Exception) -> bool:
    if isinstance(error, ModuleNotFoundError):
        return (
            error.name is None
        )  # said by fedlight of an optional package; a failed import has the module's name
    if isinstance(error, (ValueError, OSError)):
        return True  # before Lightning, which takes seconds to load, is asked for its own
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    return isinstance(error, MisconfigurationException)
