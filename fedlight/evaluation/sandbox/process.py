"""Processes of the sandbox: their limits, start, output until the first of them ends, and results."""

import json
import math
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

INSIDE = Path(__file__).with_name("inside.py")
# No packages and no files of the user; not -I, which would draw a hash seed.
FLAGS = ["-s", "-P", "-S", "-B", "-X", "utf8"]
STARTED = b"locked\n"
LOOK_EVERY_SECONDS = 0.02
START_SECONDS = 60.0

Outcome = Literal["finished", "error", "exited", "timeout", "files"]


@dataclass(frozen=True)
class Limits:
    """Limits of one process; exceeding one fails the code, never the machine.

    Args:
        wall_seconds: wall-clock time, above 0; then the process is killed.
        cpu_seconds: processor time, whole seconds from 1; then the kernel kills the process.
        memory_mib: address space from 64 MiB, 40 of them the interpreter's own; beyond it the code gets ``MemoryError``.
        file_mib: size of a file, from 1; beyond it the code gets ``OSError``.
        files: number of files in the folder, from 0; counted every 20 ms, more of them end the process.
        open_files: number of open files and pipes, from 16.
        output_kib: bytes that are kept of stdout and of stderr, from 1 KiB; the rest is read and dropped.

    Raises:
        ValueError: a limit is below its lowest value, or no whole number where it has to be one.
    """

    wall_seconds: float = 20.0
    cpu_seconds: int = 3
    memory_mib: int = 512
    file_mib: int = 1
    files: int = 16
    open_files: int = 32
    output_kib: int = 64

    def __post_init__(self) -> None:
        if type(self.wall_seconds) not in (int, float) or not 0 < self.wall_seconds < math.inf:
            raise ValueError(f"wall_seconds={self.wall_seconds!r} must be a number above 0, 20 for example")
        least = {
            "cpu_seconds": 1,
            "memory_mib": 64,
            "file_mib": 1,
            "files": 0,
            "open_files": 16,
            "output_kib": 1,
        }
        for name, lowest in least.items():
            if type(value := getattr(self, name)) is not int or value < lowest:
                raise ValueError(f"{name}={value!r} must be a whole number, {lowest} or more in the sandbox")


class Result(NamedTuple):
    """Result of a run.

    Attributes:
        outcome: ``finished``: ran to its end; ``error``: an exception that was not caught (also ``SystemExit``); ``exited``:
            the process ended before the code did, by itself or by a limit on processor or memory; ``timeout``: killed after
            its time; ``files``: left too many files.
        status: exit status of the process, or minus the signal that ended it.
        stdout: printed text, cut off at the limit; bytes that are not UTF-8 are replaced.
        stderr: likewise of stderr; ends with the traceback of an exception.
        seconds: wall-clock time.
    """

    outcome: Outcome
    status: int
    stdout: str
    stderr: str
    seconds: float


class SandboxError(OSError):
    """Error for a machine that cannot run the sandbox; the message names the missing part and the remedy."""


class SandboxedProcess:
    """Process with one piece of code, in a new folder, the only writable one, which the caller removes.

    ``protection`` is that of the folder, empty for none. The code's ``__name__`` is ``name``; it may import ``modules``
    (name -> source) besides the standard library and inherits the file descriptors ``pipes``.
    """

    def __init__(
        self,
        code: str,
        limits: Limits,
        protection: Mapping[str, object],
        folder: Path,
        modules: Mapping[str, str],
        name: str,
        pipes: Sequence[int],
    ) -> None:
        self.limits, self.folder = limits, folder
        self.token = secrets.token_hex(16)
        self.begun_at: float | None = None
        self.ended_at: float | None = None
        pipes_of = {stream: os.pipe() for stream in ("stdout", "stderr", "status")}
        self.streams = {stream: reads for stream, (reads, _) in pipes_of.items()}
        self.kept = {stream: bytearray() for stream in pipes_of}
        writes = {stream: write for stream, (_, write) in pipes_of.items()}
        order = {
            "code": code,
            "modules": dict(modules),
            "name": name,
            "token": self.token,
            "status": writes["status"],
            "parent": os.getpid(),
            "limits": asdict(limits),
            "protected": bool(protection),
            **protection,
        }
        try:
            self.process = self._start(order, writes, pipes)
        except BaseException:
            self._close_pipes()
            raise
        finally:
            # Else the end of the child's output would never be seen.
            for write in writes.values():
                os.close(write)

    def _start(
        self, order: Mapping[str, object], writes: Mapping[str, int], pipes: Sequence[int]
    ) -> "subprocess.Popen[bytes]":
        # Some interpreters need it to find their own library.
        library_path = os.environ.get("LD_LIBRARY_PATH")
        with tempfile.TemporaryFile() as file:  # long code would fill a pipe before it is read
            file.write(json.dumps(order).encode())
            file.seek(0)
            return subprocess.Popen(
                [sys.executable, *FLAGS, str(INSIDE)],
                stdin=file.fileno(),
                stdout=writes["stdout"],
                stderr=writes["stderr"],
                cwd=self.folder,
                env={"PYTHONHASHSEED": "0"} | ({"LD_LIBRARY_PATH": library_path} if library_path else {}),
                pass_fds=(writes["status"], *pipes),
                start_new_session=True,
            )

    def _close_pipes(self) -> None:
        for pipe in self.streams.values():
            os.close(pipe)

    def read(self, stream: str) -> bool:
        """Read available output of a stream; return False at its end."""
        data = os.read(self.streams[stream], 1 << 16)
        kept = self.kept[stream]
        kept += data[: max(self.limits.output_kib * 1024 - len(kept), 0)]
        if stream == "status" and self.begun_at is None:
            self.begun_at = time.monotonic()
        return bool(data)

    def is_overdue(self) -> bool:
        """Return whether the code has exceeded its wall-clock time; loading the interpreter does not count."""
        return self.begun_at is not None and time.monotonic() - self.begun_at >= self.limits.wall_seconds

    def has_too_many_files(self) -> bool:
        """Return whether the folder holds more files than allowed."""
        with os.scandir(self.folder) as entries:
            return any(number >= self.limits.files for number, _ in enumerate(entries))

    def has_ended(self) -> bool:
        """Return whether the process has ended."""
        # WNOWAIT leaves a zombie until `kill`, so the id is not used again.
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def kill(self) -> int:
        """End the process and all others of its group, if it could start any; return its exit status."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                # It leads a new session, so the group's id is the process's.
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.ended_at = time.monotonic()
        return self.process.returncode

    def close(self) -> None:
        """End the process and close its pipes."""
        self.kill()
        self._close_pipes()

    def result(self, stopped: Outcome | None) -> Result:
        """End the process and return its result; ``stopped`` is the reason why it was stopped, None if it ended by itself.

        Raises:
            SandboxError: the code was never started.
        """
        status = self.kill()
        stdout, stderr = (self.kept[stream].decode(errors="replace") for stream in ("stdout", "stderr"))
        reported = bytes(self.kept["status"])
        if self.begun_at is None or self.ended_at is None or not reported.startswith(STARTED):
            raise SandboxError(f"the sandbox could not be entered (exit status {status}): {stderr.strip()}")
        outcome = stopped or self._outcome(status, reported)
        return Result(outcome, status, stdout, stderr, self.ended_at - self.begun_at)

    def _outcome(self, status: int, reported: bytes) -> Outcome:
        if status == 0 and reported == STARTED + self.token.encode():
            return "finished"
        if status == -signal.SIGXCPU:
            return "timeout"
        return "error" if status == 1 else "exited"


def watch(processes: Sequence[SandboxedProcess], at_most_seconds: float = math.inf) -> Outcome | None:
    """Read the output of processes until the first of them has ended (None), or one must be stopped (the reason)."""
    leader, began_at = processes[0], time.monotonic()
    with selectors.DefaultSelector() as selector:
        for process in processes:
            for stream, pipe in process.streams.items():
                selector.register(pipe, selectors.EVENT_READ, (process, stream))
        # A leader that has ended may have left output in its pipes.
        while not leader.has_ended() or any(key.data[0] is leader for key in selector.get_map().values()):
            for key, _ in selector.select(timeout=LOOK_EVERY_SECONDS):
                process, stream = key.data
                if not process.read(stream):
                    selector.unregister(key.fd)
            if any(process.has_too_many_files() for process in processes):
                return "files"
            patience = at_most_seconds if leader.begun_at else min(at_most_seconds, START_SECONDS)
            if any(process.is_overdue() for process in processes) or time.monotonic() - began_at >= patience:
                return "timeout"
    return None
