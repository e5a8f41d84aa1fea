"""Watch over the processes of a team: when one is gone, the others end at once instead of waiting for it forever.

Every process holds a TCP connection to process 0. The kernel closes it when a process dies, however that happens. Whoever
is done with its work says so before it closes the connection. A process that fails by an error says that too: the others
may be about to fail by the same error, such as a refused setting, so they end only if they have not within a few seconds.
"""

import json
import os
import secrets
import socket
import sys
import threading
from typing import Any, BinaryIO, Protocol

from fedlight.federation.client_state import PassingMemories

GRACE_SECONDS = 3.0
"""Until a process whose team has failed ends, unless it fails by itself."""
JOIN_SECONDS = 600.0
"""Until all processes have to be there."""
ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds, seconds and tries after which a host that does not answer counts as gone."""
LOOPBACK = ("localhost", "127.0.0.1")


class Store(Protocol):
    """Key-value store of all processes, such as `torch.distributed.TCPStore`."""

    def set(self, key: str, value: str, /) -> None:
        """Set a value."""

    def get(self, key: str, /) -> bytes:
        """Return a value; wait until there is one."""


class Watch:
    """Watch of one process over the others.

    Args:
        rank: number of this process.
        size: number of processes, at least 2.
        store: store in which process 0 says where it listens.
        host: address of process 0, as the others reach it.

    Attributes:
        has_failed: whether this process ends by an error.
    """

    def __init__(self, rank: int, size: int, store: Store, host: str) -> None:
        self.rank = rank
        self._sending = threading.Lock()
        self._at_work = self.has_failed = False
        self._lost = ""
        self._resting: set[int] = set()
        self._peers: dict[int, tuple[socket.socket, BinaryIO]] = {}
        if rank == 0:
            self._listen(size, store, host)
        else:
            self._connect(store, host)
        if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
            os.register_at_fork(
                after_in_child=self._drop
            )  # a loader's process would keep the connections open
        for peer, (_, lines) in self._peers.items():
            threading.Thread(target=self._read, args=(peer, lines), daemon=True).start()

    def _listen(self, size: int, store: Store, host: str) -> None:
        word = secrets.token_hex(16)
        with socket.create_server((host if host in LOOPBACK else "", 0), backlog=size) as server:
            server.settimeout(JOIN_SECONDS)
            store.set("fedlight/watch", json.dumps({"port": server.getsockname()[1], "word": word}))
            while len(self._peers) < size - 1:
                connection, lines = _opened(server.accept()[0])
                hello = _message(lines.readline(200))
                if hello.get("word") == word:
                    self._peers[int(hello["rank"])] = connection, lines
                else:
                    lines.close()
                    connection.close()

    def _connect(self, store: Store, host: str) -> None:
        there = json.loads(store.get("fedlight/watch"))
        address = (host, there["port"])
        self._peers[0] = _opened(socket.create_connection(address, timeout=JOIN_SECONDS))
        self._tell(word=there["word"], rank=self.rank)

    def begin(self) -> None:
        """Begin to end this process when another one is gone; raise ConnectionError if one is gone already."""
        if self._lost:
            raise ConnectionError(f"{self._lost}: start all processes again")
        self._at_work = True
        self._tell(state="working", rank=self.rank)

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
        try:
            for line in lines:
                self._take(_message(line), peer)
        except OSError:
            pass  # a connection that was reset has ended as well
        if peer not in self._resting:
            self._lose(peer, "is gone")

    def _take(self, message: dict[str, Any], peer: int) -> None:
        state = message.get("state")
        if state == "resting":
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
            print(
                f"fedlight: {self._lost}, so process {self.rank} ends too: start again from the newest checkpoint",
                file=sys.stderr,
                flush=True,
            )
        PassingMemories.remove_all()
        # The main thread may wait in an exchange for ever. Files are written whole, so nothing has to be finished.
        os._exit(1)

    def _drop(self) -> None:
        for connection, _ in self._peers.values():
            os.close(connection.detach())
        self._peers = {}


def _message(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _opened(connection: socket.socket) -> tuple[socket.socket, BinaryIO]:
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in ALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection, connection.makefile("rb")
