"""Watch over the processes of a team: when one is gone, the others end at once instead of waiting for it forever.

Every process holds a TCP connection to process 0. The kernel closes it when a process dies, however that happens. Whoever
is done with its work says so before it closes the connection. A process that fails by an error says that too: the others
may be about to fail by the same error, such as a refused setting, so they end only if they have not within a few seconds.

A thread of each process says every few seconds that it is alive, however long the main thread computes. A process that is
stopped, or whose host hangs, falls silent, and the others end. A main thread that hangs, such as in reading from a file
server that is gone, cannot be told from one that computes: whom the others wait for is said, and where it is.
"""

import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from fedlight.federation.client_state import PassingMemories

GRACE_SECONDS = 3.0
"""Until a process whose team has failed ends, unless it fails by itself."""
JOIN_SECONDS = 600.0
"""Until all processes have to be there."""
HELLO_SECONDS = 10.0
"""Until a new connection has said who it is."""
BEAT_SECONDS = 5.0
"""Between two signs of life."""
SILENT_SECONDS = 120.0
"""Without a sign of life after which a process counts as stopped: code that keeps Python's other threads from running,
such as reading a large file of JSON, or a machine that swaps, may hold signs back for seconds."""
SAID_AFTER_SECONDS = 600.0
"""Of waiting for a process that is alive until that is said; again after twice the time, and so on."""
ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds, seconds and tries after which a host that does not answer counts as gone."""
LOOPBACK = ("localhost", "127.0.0.1")


class Watch:
    """Watch of one process over the others.

    Args:
        rank: number of this process.
        size: number of processes, at least 2.
        store: store for the address of process 0, such as ``torch.distributed.TCPStore``.
        host: address of process 0, as the others reach it.

    Attributes:
        has_failed: whether this process ends by an error.
    """

    def __init__(self, rank: int, size: int, store: Any, host: str) -> None:
        self.rank = rank
        self._sending = threading.Lock()
        self._at_work = self.has_failed = False
        self._lost = ""
        self._resting: set[int] = set()
        self._peers: dict[int, tuple[socket.socket, BinaryIO]] = {}
        self._names: dict[int, str] = {}
        self._heard: dict[int, float] = {}
        self._waits_since: float | None = None
        self._wait_seconds: float | None = None
        self._places: dict[int, str] = {}
        self._said_at = SAID_AFTER_SECONDS
        threading.Thread(target=self._beat, daemon=True).start()
        try:
            if rank == 0:
                self._listen(size, store, host)
            else:
                self._connect(store, host)
        except BaseException as error:
            self._lost = self._lost or f"process {rank} has failed ({type(error).__name__})"
            self._close()
            raise
        if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
            os.register_at_fork(
                after_in_child=self._drop
            )  # a loader's process would keep the connections open

    def _listen(self, size: int, store: Any, host: str) -> None:
        word = secrets.token_hex(16)
        with socket.create_server((host if host in LOOPBACK else "", 0), backlog=size) as server:
            server.settimeout(1.0)
            until = time.monotonic() + JOIN_SECONDS
            there = {"port": server.getsockname()[1], "word": word, "name": _own_name()}
            store.set("fedlight/watch", json.dumps(there))
            while len(self._peers) < size - 1:
                if self._lost:  # of those that are there already
                    raise ConnectionError(f"{self._lost}: start all processes again")
                try:
                    connection, lines = _opened(server.accept()[0])
                except TimeoutError:
                    if time.monotonic() > until:
                        raise TimeoutError(f"{len(self._peers) + 1} of {size} are there") from None
                    continue
                hello = _hello(connection, lines)
                if hello.get("word") == word:
                    self._follow(int(hello["rank"]), str(hello["name"]), connection, lines)
                else:
                    lines.close()
                    connection.close()

    def _connect(self, store: Any, host: str) -> None:
        there = json.loads(store.get("fedlight/watch"))
        address = (host, there["port"])
        connection, lines = _opened(socket.create_connection(address, timeout=JOIN_SECONDS))
        self._follow(0, there["name"], connection, lines)
        self._tell(word=there["word"], rank=self.rank, name=_own_name())

    def _follow(self, peer: int, name: str, connection: socket.socket, lines: BinaryIO) -> None:
        """Follow a process from now on, also while others are still to come."""
        self._names[peer], self._heard[peer] = name, time.monotonic()
        with self._sending:
            self._peers = {**self._peers, peer: (connection, lines)}
        threading.Thread(target=self._read, args=(peer, lines), daemon=True).start()

    def begin(self, wait_seconds: float | None = None) -> None:
        """Begin to end this process when another one is gone.

        Args:
            wait_seconds: longest wait for another process that is alive; None: any.

        Raises:
            ConnectionError: one is gone already.
        """
        if self._lost:
            raise ConnectionError(f"{self._lost}: start all processes again")
        self._at_work, self._wait_seconds = True, wait_seconds
        self._tell(state="working", rank=self.rank)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark that this process waits for the others while the body runs."""
        self._said_at, self._waits_since = SAID_AFTER_SECONDS, time.monotonic()
        try:
            yield
        finally:
            self._waits_since = None

    def rest(self) -> None:
        """Say that this process is done for now, so that it may end."""
        if not self.has_failed:
            self._at_work = False
            self._tell(state="resting", rank=self.rank)

    def fail(self, why: str) -> None:
        """Say that this process ends because of an error; call it before the error is raised further."""
        if not self.has_failed:
            self.has_failed = True
            self._tell(state="failed", rank=self.rank, why=why)

    def _beat(self) -> None:
        """Say every few seconds that this process is alive and, unless it waits, where it computes; look after others."""
        before = time.monotonic()
        while not self._lost:
            time.sleep(BEAT_SECONDS)
            self._tell(state="alive", place="" if self._waits_since else _place_of_main_thread())
            now = time.monotonic()
            if now - before > SILENT_SECONDS / 2:  # this process itself was stopped: it has not read yet
                self._heard = dict.fromkeys(self._heard, now)
            before = now
            for peer in {*self._peers} - self._resting:
                self._look_after(peer, now)

    def _look_after(self, peer: int, now: float) -> None:
        """End this process if another one is silent, or has it wait for too long; say a long wait."""
        if (silent := now - self._heard[peer]) > SILENT_SECONDS:
            self._lose(
                peer, f"({self._names[peer]}) is stopped or its host hangs, silent for {silent:.0f} seconds"
            )
        place, since = self._places.get(peer, ""), self._waits_since
        if (
            not place or since is None or self.rank > 1
        ):  # process 1 looks after process 0, which looks after all
            return
        waited, at = now - since, f"({self._names[peer]}) is at {place}"
        longest = self._wait_seconds
        # A place is up to a beat old: by then the process may wait as well.
        if longest is not None and waited > max(longest, 2 * BEAT_SECONDS):
            self._lose(peer, f"{at} and has kept process {self.rank} waiting for {waited:.0f} seconds")
        elif waited > self._said_at:
            self._said_at = 2 * waited
            _say(f"process {self.rank} has waited for {waited:.0f} seconds: process {peer} {at}")

    def _tell(self, **message: Any) -> None:
        line = json.dumps(message).encode() + b"\n"
        with self._sending:
            for connection, _ in self._peers.values():
                try:
                    connection.sendall(line)
                except OSError:
                    continue  # the thread that reads from it notices its end

    def _read(self, peer: int, lines: BinaryIO) -> None:
        """Follow one connection until it ends."""
        with lines, suppress(OSError):  # one that was reset has ended as well
            for line in lines:
                self._take(_message(line), peer)
        if peer not in self._resting:
            self._lose(peer, "is gone")

    def _take(self, message: dict[str, Any], peer: int) -> None:
        state = message.get("state")
        self._heard[peer] = time.monotonic()
        if state == "alive":
            self._places[peer] = str(message["place"])
        elif state == "resting":
            self._resting.add(peer)
        elif state == "working":
            self._resting.discard(peer)
        elif state == "failed":
            self._lose(message["rank"], f"has failed ({message['why']})", GRACE_SECONDS)
        elif state == "lost":
            self._lose(message["rank"], message["how"], message["seconds"])

    def _lose(self, who: int, how: str, seconds: float = 0.0) -> None:
        """End this process, after ``seconds`` if it has not failed by itself until then."""
        if self._lost:
            return
        self._lost = f"process {who} {how}"
        if self.rank == 0:
            self._tell(state="lost", rank=who, how=how, seconds=seconds)
        if self._at_work:
            timer = threading.Timer(seconds, self._end)
            timer.daemon = True
            timer.start()

    def _end(self) -> None:
        if self.has_failed:
            return
        if self.rank == 0 or self._lost.startswith("process 0 "):  # otherwise process 0 says it
            _say(f"{self._lost}, so process {self.rank} ends too: start again from the newest checkpoint")
        PassingMemories.remove_all()
        # The main thread may wait in an exchange for ever. Files are written whole, so nothing has to be finished.
        os._exit(1)

    def _close(self) -> None:
        """End the connections; their readers find the end and close them, as a reader may be within a line."""
        for connection, _ in self._peers.values():
            with suppress(OSError):  # the other end may be gone
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._peers = {}

    def _drop(self) -> None:
        for connection, _ in self._peers.values():
            os.close(connection.detach())
        self._peers = {}


def _say(text: str) -> None:
    print(f"fedlight: {text}", file=sys.stderr, flush=True)


def _own_name() -> str:
    return f"pid {os.getpid()} on {socket.gethostname()}"


def _place_of_main_thread() -> str:
    """Return where the main thread computes, as file, line and function."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return (
        ""
        if frame is None
        else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
    )


def _message(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _hello(connection: socket.socket, lines: BinaryIO) -> dict[str, Any]:
    """Return the first message of a new connection; an empty one if none comes in time, as from a stranger."""
    connection.settimeout(HELLO_SECONDS)
    try:
        return _message(lines.readline(200))
    except OSError:  # a timeout, or a connection that was reset
        return {}
    finally:
        connection.settimeout(None)


def _opened(connection: socket.socket) -> tuple[socket.socket, BinaryIO]:
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in ALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection, connection.makefile("rb")
