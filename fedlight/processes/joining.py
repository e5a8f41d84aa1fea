"""First meeting of the processes of a team, at the address that their starter gives them."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.plugins import ClusterEnvironment
from torch import Tensor, distributed

from fedlight.processes.team import Team
from fedlight.processes.watch import GRACE_SECONDS, JOIN_SECONDS, Watch
from fedlight.support.words import first_line

SAID_AFTER_SECONDS = 10.0
"""Until a process says that it waits for the others to start."""
_joined: dict[str, tuple[Team, Watch]] = {}
"""Team of this process, by its name ``"team"``: it is joined once, however many runs the process has."""


def join(environment: ClusterEnvironment) -> tuple[Team, Watch]:
    """Return the team of all processes and the watch over them; the first time, wait until all are there.

    Raises:
        ValueError: an earlier run of this process had another number of processes.
        ConnectionError: the others are not there within `JOIN_SECONDS`, or one of them is gone.
    """
    rank, size = environment.global_rank(), environment.world_size()
    if "team" in _joined:
        if (team := _joined["team"][0]).size != size:
            raise ValueError(
                f"this run is to have {size} processes and an earlier one here had {team.size}: start them anew"
            )
        return _joined["team"]
    host, port = environment.main_address, environment.main_port
    with _patience(rank, size, f"{host}:{port}"):
        store = _store(rank, host, port)
        watch = Watch(rank, size, store, host)
        # From here on the watch ends this process when another one is gone, also while the group waits for it.
        watch.begin()
        group = distributed.ProcessGroupGloo(store, rank, size, timedelta(days=30))

    def exchange(data: memoryview) -> list[memoryview]:
        try:
            with watch.waiting():
                return _all_of(group, rank, size, data)
        except RuntimeError as error:
            time.sleep(GRACE_SECONDS + 1)  # meanwhile the watch ends this process and says why
            raise ConnectionError(f"the other processes cannot be reached: {first_line(error)}") from error

    _joined["team"] = Team(rank, size, exchange), watch
    return _joined["team"]


def joined_watch() -> Watch | None:
    """Return the watch over the other processes; None before they have met."""
    return _joined["team"][1] if "team" in _joined else None


def fail(exception: BaseException) -> None:
    """Let the other processes know that this one ends by ``exception``, if there are any."""
    if (watch := joined_watch()) is not None:
        kind, line = type(exception).__name__, first_line(exception)
        watch.fail(kind if line == kind else f"{kind}: {line}")


def leave() -> None:
    """Forget the team of this process, whose other processes end; the next run may have another one."""
    _joined.clear()


def _store(rank: int, host: str, port: int) -> Any:
    """Return the store of all processes, in process 0 or in torchrun's agent, without waiting for all of them.

    torch's own rendezvous waits in the store for all processes, and one that dies meanwhile is not noticed.
    """
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    patience = timedelta(seconds=JOIN_SECONDS)
    is_here = rank == 0 and not has_agent
    stores: Any = distributed  # some builds of torch have none
    return stores.TCPStore(host, port, None, is_here, patience, wait_for_workers=False, multi_tenant=True)


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


def _all_of(group: Any, rank: int, size: int, data: memoryview) -> list[memoryview]:
    """Return the bytes of all processes; each sends its own, however long, to all, and nothing is copied."""
    own = torch.tensor([len(data)])
    lengths: list[Tensor] = [torch.zeros_like(own) for _ in range(size)]
    group.allgather([lengths], [own]).wait()
    found = []
    for root, length in enumerate(lengths):
        here = root == rank
        part = (
            torch.frombuffer(data, dtype=torch.uint8) if here else torch.empty(int(length), dtype=torch.uint8)
        )
        options = distributed.BroadcastOptions()
        options.rootRank = root
        group.broadcast([part], options).wait()
        found.append(part.numpy().data)
    return found
