"""First meeting of the processes of a team, at the address that their starter gives them."""

import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.plugins import ClusterEnvironment
from torch import Tensor, distributed

from fedlight.processes.seat import take_seat
from fedlight.processes.team import Team
from fedlight.support.words import first_line

JOIN_SECONDS = 600.0
"""Until all processes have to be there."""
GRACE_SECONDS = 3.0
"""Until the error of a process that has closed its connections is there, if it had one."""
SAID_AFTER_SECONDS = 10.0
"""Until a process says that it waits for the others to start."""
FOR_EVER = timedelta(days=30)
"""Wait for a process that is alive, where nothing bounds it: a visit may take hours. Gloo counts no longer ones."""
OF_CONNECTIONS = ("onnection", "monitoredBarrier", "Timed out", "timed out", "Broken pipe", "Socket")
"""Words of which gloo's errors have one where another process cannot be reached."""
OF_TORCH = ("gloo/transport", "NCCL")
"""Of the same errors inside a step, where a module's own may have those words."""
SMALL_BYTES = 2**14
"""Of a message that a process sends to each of the others at once; larger ones go from process to process, one by one."""
FAILED = "fedlight/failed"
"""Key of the store with the process that has failed first, and its error."""
FOLLOWS = "fedlight/follows"
"""Beginning of the keys of processes that end because another one is gone, and are gone too."""


class Others:
    """The other processes, reached by torch.distributed's gloo.

    gloo notices at the next exchange when another process has closed its connections, however it ended. A process that is
    stopped or hangs, alive for the kernel, is noticed by the longest wait alone.

    Args:
        rank: number of this process.
        size: number of processes, at least 2.
        store: store of all processes.
        per_client: processes that train each client together, a divisor of ``size``.

    Attributes:
        has_failed: whether this process ends by an error.
    """

    def __init__(self, rank: int, size: int, store: Any, per_client: int = 1) -> None:
        self.rank, self.size, self._store = rank, size, store
        store.set(f"fedlight/here/{rank}", "")
        store.wait([f"fedlight/here/{other}" for other in range(size)], timedelta(seconds=JOIN_SECONDS))
        store.set_timeout(timedelta(seconds=GRACE_SECONDS))
        groups: Any = distributed
        self._group = self._same_place = groups.ProcessGroupGloo(store, rank, size, FOR_EVER)
        if per_client > 1:
            seat, place = divmod(rank, per_client)
            store_here = groups.PrefixStore(f"place_{place}", store)
            self._same_place = groups.ProcessGroupGloo(store_here, seat, size // per_client, FOR_EVER)
        self.begin(None)

    def begin(self, wait_seconds: float | None) -> None:
        """Begin a run, with this process not failed; ``wait_seconds``: longest wait at an exchange, None: any."""
        longest = _longest(wait_seconds)
        # Process 0 finds the missing ones, so the others wait for it for longer.
        self._wait = longest if self.rank == 0 else 2 * longest + timedelta(seconds=GRACE_SECONDS)
        for group in (self._group, self._same_place):
            group.set_timeout(self._wait)
        self.has_failed = False

    def exchange(self, data: memoryview) -> list[memoryview]:
        """Return the bytes of all processes.

        Raises:
            ConnectionError: another process is gone, has failed, or is not here in time.
        """
        parts = [data] * self.size
        with self.reached():
            lengths = self._lengths(parts)
            if max(lengths) <= SMALL_BYTES:
                return self._swapped(parts, lengths)
            received = []
            for root, length in enumerate(lengths):  # gloo's gather would pad all to the longest
                sent = data if root == self.rank else bytearray(length)
                part = torch.frombuffer(sent, dtype=torch.uint8)
                options = distributed.BroadcastOptions()
                options.rootRank = root
                self._group.broadcast([part], options).wait()
                received.append(part.numpy().data)  # a view: sums of a whole model are gigabytes
            return received

    def add(self, tensor: Tensor) -> None:
        """Add up a tensor over all processes, in place, in a ring; raise ConnectionError as `exchange` does."""
        self._add(self._group, tensor)

    def add_here(self, tensor: Tensor) -> None:
        """Add up a tensor over the processes with the same place in the groups that train clients."""
        self._add(self._same_place, tensor)

    def _add(self, group: Any, tensor: Tensor) -> None:
        with self.reached():
            group.allreduce([tensor]).wait()  # a sum, if not told otherwise

    def swap(self, parts: Sequence[memoryview]) -> list[memoryview]:
        """Send each process its part, and return the parts for this one; raise ConnectionError as `exchange` does."""
        with self.reached():
            return self._swapped(parts, self._lengths(parts))

    def _lengths(self, parts: Sequence[memoryview]) -> list[int]:
        """Wait for all processes, and return the lengths of the parts that they have for this one."""
        self._group.monitored_barrier(self._wait)  # a plain barrier does not name the missing process
        ours, theirs = torch.tensor([[len(part) for part in parts], [0] * self.size])
        self._group.alltoall_base(theirs, ours, [1] * self.size, [1] * self.size).wait()
        return list(map(int, theirs))

    def _swapped(self, parts: Sequence[memoryview], lengths: list[int]) -> list[memoryview]:
        received = torch.empty(sum(lengths), dtype=torch.uint8)
        sent = torch.frombuffer(bytearray().join(parts), dtype=torch.uint8)
        self._group.alltoall_base(received, sent, lengths, [len(part) for part in parts]).wait()
        return [part.numpy().data for part in received.split(lengths)]

    @contextmanager
    def reached(self, words: Sequence[str] = OF_CONNECTIONS) -> Iterator[None]:
        """Raise ConnectionError for torch's error of a connection, which has one of the ``words``."""
        try:
            yield
        except RuntimeError as error:
            if not any(word in str(error) for word in words):  # such as one about memory
                raise
            raise ConnectionError(self.explain(error)) from error

    def explain(self, error: RuntimeError) -> str:
        """Return which process is gone, by torch's error; this one fails too, and says no more."""
        self.has_failed = True
        if self.rank > 0:
            with suppress(RuntimeError):  # the store is gone with process 0
                self._store.set(f"{FOLLOWS}{self.rank}", "")  # waits for no answer: process 0 may be silent
        return f"{self._who(error)}, so process {self.rank} ends too: start again from the newest checkpoint"

    def _who(self, error: RuntimeError) -> str:
        """Return which other process ended the exchange, and how; processes other than 0 know of process 0 alone."""
        is_late = "Timed out" in str(error)
        late = f"is not here after {self._wait.total_seconds():g} seconds"
        if self.rank > 0:
            if is_late and "monitoredBarrier" in str(error):  # nowhere else it waits for process 0 alone
                return f"process 0 {late}"
            return (
                f"process 0 or another one {late if is_late else 'has ended'} (see the output of process 0)"
            )
        named = re.search(r"Rank (\d+) failed to pass", str(error))
        if is_late:
            return f"{f'process {named[1]}' if named else 'another process'} {late}"
        # Its error may be on its way, and so may the end of its connections.
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline:
            if self._store.check([FAILED]):
                return str(self._store.get(FAILED).decode())
            time.sleep(0.05)
        gone = [other for other in range(1, self.size) if self._is_gone(other)]
        first = [other for other in gone if not self._store.check([f"{FOLLOWS}{other}"])]
        if len(first) == 1:
            return f"process {first[0]} is gone"
        return f"process {named[1]} is gone" if named else f"another process is gone ({first_line(error)})"

    def _is_gone(self, other: int) -> bool:
        """Return whether the connection to another process is closed, by beginning to send a number that is never read."""
        try:
            # Without a wait: a process that is there would not end it.
            self._group.send([torch.zeros(1)], other, 1)
        except RuntimeError:
            return True
        return False

    def fail(self, reason: str) -> None:
        """Let process 0 know that this process ends because of an error; call it before the error is raised further."""
        if not self.has_failed:
            self.has_failed = True
            with suppress(RuntimeError):  # the store is gone with process 0
                self._store.compare_set(FAILED, "", f"process {self.rank} has failed ({reason})")


_joined: list[tuple[Team, Others]] = []
"""Team of this process, once it is joined: once, however many runs the process has."""


def join(
    environment: ClusterEnvironment,
    per_client: int = 1,
    device: str = "cpu",
    wait_seconds: float | None = None,
) -> tuple[Team, Others]:
    """Return the team of all processes and the way to the others; the first time, wait until all are there.

    Args:
        environment: way that the processes were started.
        per_client: processes that train a client together, a divisor of all.
        device: type of their devices.
        wait_seconds: longest wait in a step of a client that several processes train; None: any.

    Raises:
        ValueError: an earlier run of this process had another number of processes, or torch's default group is there
            already.
        ConnectionError: the others are not there within `JOIN_SECONDS`.
    """
    rank, size = environment.global_rank(), environment.world_size()
    if not _joined:
        host, port = environment.main_address, environment.main_port
        with _patience(rank, size, f"{host}:{port}"):
            store = _store(rank, host, port)
            if per_client > 1:
                take_seat(store, rank, per_client, device, _longest(wait_seconds))
            others = Others(rank, size, store, per_client)
        ways = (others.exchange, others.add, others.swap, per_client, others.add_here)
        _joined.append((Team(rank, size, *ways), others))
    team = _joined[0][0]
    if (team.size, team.per_client) != (size, per_client):
        raise ValueError(
            f"this run is to have {size} processes, {per_client} for each client, and an earlier one here had {team.size} "
            f"and {team.per_client}: start them anew"
        )
    return _joined[0]


def joined() -> Others | None:
    """Return the way to the other processes; None before they have met."""
    return _joined[0][1] if _joined else None


def fail(exception: BaseException) -> None:
    """Let the other processes know that this one ends by ``exception``, if there are any."""
    others = joined()
    # An error of torch's is that of another one, which has failed.
    if others is not None and not any(word in str(exception) for word in OF_TORCH):
        kind, line = type(exception).__name__, first_line(exception)
        others.fail(kind if line == kind else f"{kind}: {line}")


def explain(exception: BaseException) -> str:
    """Return which other process is gone, if that is the reason of torch's error; else an empty string."""
    others = joined()
    if others is None or not any(word in str(exception) for word in OF_TORCH):
        return ""
    return others.explain(RuntimeError(str(exception)))


def _longest(seconds: float | None) -> timedelta:
    return FOR_EVER if seconds is None else timedelta(seconds=min(seconds, FOR_EVER.total_seconds()))


def leave() -> None:
    """Forget the team of this process, whose other processes end; the next run may have another one."""
    _joined.clear()


def _store(rank: int, host: str, port: int) -> Any:
    """Return the store of all processes, in process 0 or in torchrun's agent, without waiting for all of them."""
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    patience = timedelta(seconds=JOIN_SECONDS)
    is_here = rank == 0 and not has_agent
    stores: Any = distributed  # some builds of torch have none
    store = stores.TCPStore(host, port, None, is_here, patience, wait_for_workers=False, multi_tenant=True)
    # The agent keeps its store when torchrun starts the processes again.
    return stores.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


@contextmanager
def _patience(rank: int, size: int, address: str) -> Iterator[None]:
    """Say once that this process waits for the others; make torch's errors of a wait that was too long one clear line."""

    def say() -> None:
        print(
            f"fedlight: process {rank} waits for the other {size - 1} of {size} at {address}: start them, or end this one "
            "if one of them has ended",
            file=sys.stderr,
            flush=True,
        )

    timer = threading.Timer(SAID_AFTER_SECONDS, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (RuntimeError, TimeoutError) as error:  # torch's DistError is a RuntimeError
        raise ConnectionError(
            f"process {rank} has not met the other {size - 1} of {size} at {address} ({first_line(error)}): look at what "
            "they have printed, and whether each host reaches this address"
        ) from error
    finally:
        timer.cancel()
