"""Lightning strategy under which several processes train one federation, each its share of every round.

Lightning sees one process in each of them (``trainer.world_size`` is 1): with more it would exchange something on every
batch, and the processes have unlike numbers of batches. They meet at set-up, around checkpoints and once in every round,
over a group that is not torch's default group: torchmetrics would add up the same value many times over that.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.utilities import rank_zero_only

from fedlight.federation.protocols import TrainsRounds
from fedlight.processes.joining import explain, fail, join, joined
from fedlight.processes.seat import hold_parts, is_split, split_as, split_layers, whole
from fedlight.processes.team import ALONE, begin, end
from fedlight.support.checks import Checked, refuse_below
from fedlight.support.pokes import process_launcher, share_threads


class ClientParallelStrategy(Checked, SingleDeviceStrategy):
    """Lightning strategy that shares the clients of each round out among processes, with the same result for any number.

    The processes are started by Lightning (``Trainer(strategy="client_parallel", devices=2)``), by ``torchrun`` or by a
    cluster such as SLURM. Each has its own device where there are several. `fedlight.FederatedLoop` has to be among the
    callbacks.

    Args:
        accelerator: see Lightning's ``Strategy``.
        parallel_devices: devices of this host, one for each of its processes; None: those of the trainer.
        cluster_environment: way that the processes were started; None: found by Lightning.
        checkpoint_io, precision_plugin: see Lightning's ``Strategy``.
        processes_per_client: processes that train each client together, a divisor of their number: each computes a part of
            the rows of a batch, and holds a part of the frozen weights in repeated layers (`fedlight.processes.seat`).
        split_trained: whether layers whose weights are all trained are split too, as in full fine-tuning; embeddings and
            heads stay whole. What works on whole updates, such as a lossy channel, is refused.
        wait_seconds: longest wait of a process for the others at the end of a round, in a step of a client of several
            processes, or at another meeting, above 0; then all end. None: any, since a visit may take hours; one that has
            ended is noticed without it.

    Attributes:
        team: processes of the run.

    Raises:
        ValueError: a number is out of its range; or, when the trainer is made, this host has fewer devices than
            processes, or their number is no multiple of ``processes_per_client``.
    """

    strategy_name = "client_parallel"

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        wait_seconds: float | None = None,
        processes_per_client: int = 1,
        split_trained: bool = False,
    ) -> None:
        refuse_below(1, processes_per_client=processes_per_client)
        if split_trained and processes_per_client == 1:
            raise ValueError(
                "trainer.strategy.split_trained=true divides weights among the processes of a client: set "
                "trainer.strategy.processes_per_client to 2 or more"
            )
        if wait_seconds is not None and not wait_seconds > 0:
            raise ValueError(
                f"trainer.strategy.wait_seconds={wait_seconds} must be above 0; None waits for any time"
            )
        super().__init__("cpu", accelerator, checkpoint_io, precision_plugin)
        self.parallel_devices = parallel_devices
        self.cluster_environment = cluster_environment
        self.num_nodes = 1
        self.size = 1
        self.wait_seconds, self.processes_per_client = wait_seconds, processes_per_client
        self.split_trained = split_trained
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
        if isinstance(environment, LightningEnvironment):  # others know their processes
            environment.set_global_rank(environment.node_rank() * len(devices) + environment.local_rank())
            environment.set_world_size(self.num_nodes * len(devices))
        self.size = environment.world_size()
        self.global_rank, self.local_rank = environment.global_rank(), environment.local_rank()
        if self.local_rank >= len(devices) and devices[0].type != "cpu":
            raise ValueError(
                f"process {self.global_rank} is number {self.local_rank} on its host, and trainer.devices gives "
                f"{len(devices)} there: set trainer.devices to the number of processes on each host"
            )
        if self.size % self.processes_per_client:
            raise ValueError(
                f"{self.size} processes cannot train each client in groups of trainer.strategy.processes_per_client="
                f"{self.processes_per_client}: start a multiple of it"
            )
        self._root_device = devices[min(self.local_rank, len(devices) - 1)]
        # Loggers are made after this and ask for it.
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def _configure_launcher(self) -> None:
        environment, devices = self.cluster_environment, self.parallel_devices
        assert environment is not None
        assert devices
        if self.size > 1 and not environment.creates_processes_externally:
            self._launcher = process_launcher(environment, len(devices), self.num_nodes)

    def setup_environment(self) -> None:
        super().setup_environment()
        assert self.cluster_environment is not None
        if self.size > 1:
            share_threads(max(1, self.size // self.num_nodes))
            self.team, others = join(
                self.cluster_environment, self.processes_per_client, self._root_device.type, self.wait_seconds
            )
            others.begin(self.wait_seconds)
            begin(self.team)

    def setup(self, trainer: Trainer) -> None:
        trains_rounds = any(isinstance(each, TrainsRounds) for each in trainer.callbacks)  # type: ignore[attr-defined]
        if self.size > 1 and trainer.training and not trains_rounds:
            raise ValueError(
                "trainer.strategy=client_parallel shares out the clients of a federation, and this run has none, so each "
                "process would train the same: add FederatedLoop to the callbacks (the key federated: of a config), or "
                "set trainer.strategy=ddp"
            )
        super().setup(trainer)

    def model_to_device(self) -> None:
        """Move the model, or the parts of it that this process keeps."""
        if self.team.per_client > 1:
            assert self.model is not None
            # First, or a device would have to hold the whole model.
            split_layers(self.model, self.split_trained)
        super().model_to_device()

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            hold_parts(optimizer)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state with whole tensors, also of layers that are split; all processes call it.

        With ``split_trained`` processes other than the first, which writes all files, have weights that are split without
        their numbers, on the device ``meta``.
        """
        state = super().lightning_module_state_dict()
        for name, value in state.items():
            state[name] = whole(value)
            if self.split_trained and not self.is_global_zero and is_split(value):
                state[name] = state[name].to("meta")  # or each would hold the whole model through a round
        return state

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the module's state, also into layers that are split."""
        assert self.lightning_module is not None
        state = split_as(checkpoint["state_dict"], dict(self.lightning_module.named_parameters()))
        super().load_model_state_dict({**checkpoint, "state_dict": state}, strict)

    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        """Return the value of process ``src``."""
        if self._has_failed:
            return obj
        value = os.fspath(obj) if isinstance(obj, Path) else obj  # a team's messages hold plain values
        received: Any = self.team.gather(value if self.global_rank == src else None, "broadcast")[src]
        return type(obj)(received) if isinstance(obj, Path) else received

    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Wait for all processes."""
        if not self._has_failed:
            self.team.barrier(f"barrier {name or ''}")

    @property
    def _has_failed(self) -> bool:
        """Whether this process ends by an error, so that the others wait for it no more."""
        others = joined() if self.size > 1 else None
        return others is not None and others.has_failed

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all processes (or any) decide so."""
        decisions = self.team.gather(bool(decision), "decision")
        return False not in decisions if all else any(decisions)  # the argument hides Python's own all

    def on_exception(self, exception: BaseException) -> None:
        """Let the other processes know that this one ends, or say which of them made it end."""
        reason = explain(exception)
        if reason:  # torch's error in a validation or generation with split layers
            end(self.team)
            raise ConnectionError(reason) from exception
        fail(exception)

    def teardown(self) -> None:
        super().teardown()
        end(self.team)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register(
            cls.strategy_name, cls, description="shares the clients of each round out among processes"
        )


ClientParallelStrategy.register_strategies(StrategyRegistry)
