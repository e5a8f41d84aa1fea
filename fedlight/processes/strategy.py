"""Lightning strategy under which several processes train one federation, each its share of every round.

Lightning sees one process in each of them (``trainer.world_size`` is 1): with more it would exchange something on every
batch, and the processes have unlike numbers of batches. They meet at set-up, around checkpoints and once in every round,
over a group of their own that is not torch's default group, by which torchmetrics would add up the same value many times.
"""

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, distributed

from fedlight.federation.protocols import TrainsRounds
from fedlight.processes.team import ALONE, Team, begin, end
from fedlight.processes.watch import GRACE_SECONDS, JOIN_SECONDS, Watch
from fedlight.support.words import first_line

_joined: dict[str, tuple[Team, Watch]] = {}
"""Team of this process, by its name ``"team"``: it is joined once, however many runs the process has."""


class ClientParallelStrategy(SingleDeviceStrategy):
    """Lightning strategy that shares the clients of each round out among processes, with the same result for any number.

    The processes are started by Lightning (``Trainer(strategy="client_parallel", devices=2)``), by ``torchrun`` or by a
    cluster such as SLURM. Each has a device of its own where there are several. `fedlight.FederatedLoop` has to be among
    the callbacks.

    Args:
        accelerator: see Lightning's ``Strategy``.
        parallel_devices: devices of this host, one for each of its processes; None: those of the trainer.
        cluster_environment: way in which the processes were started; None: found by Lightning.
        checkpoint_io, precision_plugin: see Lightning's ``Strategy``.

    Attributes:
        team: processes of the run.

    Raises:
        ValueError: when the trainer is made, if this host has fewer devices than processes.
    """

    strategy_name = "client_parallel"

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__("cpu", accelerator, checkpoint_io, precision_plugin)
        self.parallel_devices = parallel_devices
        self.cluster_environment = cluster_environment
        self.num_nodes = 1
        self.size = 1
        self.team = ALONE

    @property
    def is_global_zero(self) -> bool:
        """Whether this is process 0, which writes all files."""
        return self.global_rank == 0

    def set_world_ranks(self) -> None:
        """Read this process's place among the others; Lightning calls it once devices and environment are known."""
        environment, devices = self.cluster_environment, self.parallel_devices
        assert environment is not None
        assert devices
        own = isinstance(environment, LightningEnvironment)
        if own:
            environment.set_global_rank(environment.node_rank() * len(devices) + environment.local_rank())
            environment.set_world_size(self.num_nodes * len(devices))
        self.size = environment.world_size()
        self.global_rank, self.local_rank = environment.global_rank(), environment.local_rank()
        if self.local_rank >= len(devices) and devices[0].type != "cpu":
            raise ValueError(
                f"process {self.global_rank} is number {self.local_rank} on its host, and trainer.devices gives "
                f"{len(devices)} there: set trainer.devices to the number of processes on each host"
            )
        self._root_device = devices[min(self.local_rank, len(devices) - 1)]
        # Loggers are made after this and ask for it.
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def _configure_launcher(self) -> None:
        environment, devices = self.cluster_environment, self.parallel_devices
        assert environment is not None
        assert devices
        if self.size > 1 and not environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(environment, len(devices), self.num_nodes)

    def setup_environment(self) -> None:
        super().setup_environment()
        assert self.cluster_environment is not None
        if self.size > 1:
            _set_num_threads_if_needed(max(1, self.size // self.num_nodes))
            self.team, self._watch = _join(self.cluster_environment)
            self._watch.begin()
            begin(self.team)

    def setup(self, trainer: Trainer) -> None:
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        if self.size > 1 and trainer.training and not any(isinstance(one, TrainsRounds) for one in callbacks):
            raise ValueError(
                "trainer.strategy=client_parallel shares out the clients of a federation, and this run has none, so each "
                "process would train the same: add FederatedLoop to the callbacks (the key federated: of a config), or "
                "set trainer.strategy=ddp"
            )
        super().setup(trainer)

    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        """Return the value of process ``src``."""
        if self._has_failed:
            return obj
        value = os.fspath(obj) if isinstance(obj, Path) else obj
        found: Any = self.team.gather(value if self.global_rank == src else None, "broadcast")[src]
        return type(obj)(found) if isinstance(obj, Path) else found

    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Wait for all processes."""
        if not self._has_failed:
            self.team.barrier(f"barrier {name or ''}")

    @property
    def _has_failed(self) -> bool:
        """Whether this process ends by an error, so that the others wait for it no more."""
        return self.size > 1 and "team" in _joined and _joined["team"][1].has_failed

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all processes (or any) decide so."""
        decisions = self.team.gather(bool(decision), "decision")
        return not any(not one for one in decisions) if all else any(decisions)

    def on_exception(self, exception: BaseException) -> None:
        """Let the other processes know that this one ends."""
        fail(exception)

    def teardown(self) -> None:
        super().teardown()
        end(self.team)
        if self.size > 1 and "team" in _joined:
            _joined["team"][1].rest()

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        strategy_registry.register(
            cls.strategy_name, cls, description="shares the clients of each round out among processes"
        )


def fail(exception: BaseException) -> None:
    """Let the other processes know that this one ends by ``exception``, if there are any."""
    if "team" in _joined:
        kind, line = type(exception).__name__, first_line(exception)
        _joined["team"][1].fail(kind if line == kind else f"{kind}: {line}")


def leave() -> None:
    """Forget the team of this process, whose other processes end; the next run may have another one."""
    _joined.clear()


def _join(environment: ClusterEnvironment) -> tuple[Team, Watch]:
    """Return the team of all processes and the watch over them; the first time, wait until all are there."""
    rank, size = environment.global_rank(), environment.world_size()
    if "team" in _joined:
        if (team := _joined["team"][0]).size != size:
            raise ValueError(
                f"this run is to have {size} processes and an earlier one here had {team.size}: start them anew"
            )
        return _joined["team"]
    host = os.environ["MASTER_ADDR"] = environment.main_address
    os.environ["MASTER_PORT"] = str(environment.main_port)
    from torch.distributed.rendezvous import rendezvous  # here, as some builds of torch lack it

    # Takes torchrun's own store where there is one.
    store, _, _ = next(rendezvous("env://", rank, size, timeout=timedelta(seconds=JOIN_SECONDS)))
    watch = Watch(rank, size, store, host)
    group = distributed.ProcessGroupGloo(store, rank, size, timedelta(days=30))  # the watch finds who is gone

    def exchange(data: memoryview) -> list[memoryview]:
        try:
            return _all_of(group, rank, size, data)
        except RuntimeError as error:
            time.sleep(GRACE_SECONDS + 1)  # meanwhile the watch ends this process and says why
            raise ConnectionError(f"the other processes cannot be reached: {first_line(error)}") from error

    _joined["team"] = Team(rank, size, exchange), watch
    return _joined["team"]


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


ClientParallelStrategy.register_strategies(StrategyRegistry)
