"""The federated loop: a Lightning epoch becomes one communication round.

A round is a list of visits, a visit is one run of local training batches at one client. The datamodule streams the
round's batches client after client; this callback notices where visits begin and end, swaps parameters there, calls
the algorithm and, at the round's last batch, lets the server step. The module and the trainer never hear of it:
``max_epochs`` counts rounds, and checkpoints, schedulers, early stopping and loggers keep their meaning.
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from fedlight.callbacks.federated_run import Run, federated_data, forget, seed_all
from fedlight.callbacks.full_disk import full_disk_named
from fedlight.callbacks.round_guard import federated_parameters, refuse_cut_rounds
from fedlight.federation.aggregation import Aggregation
from fedlight.federation.algorithm import Algorithm
from fedlight.federation.algorithms.fedavg import FedAvg
from fedlight.federation.channel import Channel, Identity
from fedlight.federation.client import Client, Visit, Work, build_clients
from fedlight.federation.memory import ClientMemories
from fedlight.federation.sampling import uniform_cohort
from fedlight.federation.server import Average, ServerOptimizer
from fedlight.federation.state import State, read, write


class FederatedLoop(L.Callback):
    """Federates whatever the trainer trains, over the clients that the datamodule knows.

    Federated are the parameters that the optimizer holds. ``Trainer(max_epochs=R)`` trains R rounds.

    Args:
        algorithm: what clients and server do; FedAvg (unbiased) if not given.
        server: the server's optimizer; plain averaging if not given.
        clients_per_round: clients sampled in a round, at most the number of clients.
        local_steps: optimizer steps of a visit; None is one pass over the client's data.
        channel: what the wire does to what is sent; lossless fp32 if not given.
        aggregation: a robust way to combine the clients' movements, such as the coordinate-wise median; the algorithm's
            own, with its weighting, if not given.
        memory: where what an algorithm keeps with each client lies between rounds; in RAM up to 256 MiB, then on disk, if
            not given.
        seed: of the sampling of clients and of everything random inside a visit.

    Attributes:
        rounds_done: rounds whose server step is done.
        visit_records: one row for each finished visit of the current round.
        visit: the visit under way, or None.

    Raises:
        ValueError: in ``setup``, before any work, for settings that would cut a round or clients that do not fit.
    """

    def __init__(
        self,
        algorithm: Algorithm | None = None,
        server: ServerOptimizer | None = None,
        clients_per_round: int = 10,
        local_steps: int | None = None,
        channel: Channel | None = None,
        aggregation: Aggregation | None = None,
        memory: ClientMemories | None = None,
        seed: int = 0,
    ) -> None:
        for name, value in (("clients_per_round", clients_per_round), ("local_steps", local_steps)):
            if value is not None and value < 1:
                raise ValueError(f"federated.{name}={value} must be at least 1")
        self.algorithm = algorithm or FedAvg()
        self.server = server or Average()
        self.clients_per_round = clients_per_round
        self.local_steps = local_steps
        self.channel = channel or Identity()
        self.aggregation = aggregation
        self.memory = memory or ClientMemories()
        self.seed = seed
        self.rounds_done = 0
        self.clients: dict[str, Client] = {}
        self.visit_records: list[dict[str, int | float | str]] = []
        self.visit: Visit | None = None
        self._inside_round = False
        self._losses: list[Tensor] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuses what cannot work, builds the clients and plans the first round."""
        if stage != "fit":
            return
        refuse_cut_rounds(trainer)
        if trainer.current_epoch == 0 and self.rounds_done > 0:
            raise ValueError(
                f"this FederatedLoop has done {self.rounds_done} rounds already: make a new one for a new run, "
                "or go on with the same trainer and a larger max_epochs"
            )
        self._data = federated_data(trainer)
        self.clients = build_clients(self._data.client_sizes())
        if self.clients_per_round > len(self.clients):
            raise ValueError(
                f"federated.clients_per_round={self.clients_per_round} is more than the {len(self.clients)} clients "
                f"of the data: set --federated.clients_per_round {len(self.clients)} or less"
            )
        self.memory.open(str(Path(trainer.default_root_dir) / "clients"))
        # Every round has a loader of its own.
        trainer.reload_dataloaders_every_n_epochs = 1  # type: ignore[attr-defined]
        self._plan_round(trainer)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Takes the optimizer's parameters; a checkpoint is loaded by now, so its round is planned."""
        self._parameters = federated_parameters(trainer, pl_module)
        self._run = Run(trainer, pl_module, self.clients, self.channel, self.aggregation is not None)
        self.algorithm.check(self._run)
        self._plan_round(trainer)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Opens the round: the module holds the global state."""
        if trainer.current_epoch != self.rounds_done:
            raise ValueError(
                f"the trainer is in epoch {trainer.current_epoch} but {self.rounds_done} rounds are done: "
                "the checkpoint that was resumed is not of a federated run with this callback"
            )
        seed_all(self.seed, "round", self.rounds_done)
        self.visit_records = []
        self._inside_round = True
        self._global = read(self._parameters)
        self.algorithm.start_round(self.rounds_done, self._cohort, self._run)
        self._aggregation = self.aggregation or self.algorithm.aggregation(len(self.clients))

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Opens the visit whose first batch this is."""
        if batch_idx in self._visit_at:
            self._begin_visit(trainer, pl_module, self._visit_at[batch_idx])

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Lets the algorithm change the client's gradients."""
        self._steps += 1
        self._lr = _learning_rate(
            trainer
        )  # at the round's last batch the scheduler is ahead of the visit's end
        self.algorithm.adjust_gradients(self._client, self._received, self._parameters)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Closes the visit, and the round, whose last batch this was."""
        self._add_loss(outputs)
        if batch_idx + 1 in self._ends:
            self._finish_visit(trainer, pl_module)
        if batch_idx + 1 == self._num_batches:
            self._finish_round(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Plans the next round; validation and the learning-rate scheduler have run."""
        self._plan_round(trainer)

    def _plan_round(self, trainer: L.Trainer) -> None:
        everyone = list(self.clients.values())
        self._cohort = uniform_cohort(everyone, self.clients_per_round, self.seed, self.rounds_done)
        accumulation = trainer.accumulate_grad_batches

        def num_batches(client_id: str) -> int:
            if self.local_steps is not None:
                return self.local_steps * accumulation
            return max(1, self._data.num_batches(client_id) // accumulation) * accumulation

        visits = self.algorithm.plan(self.rounds_done, self._cohort, num_batches)
        for visit in visits:
            if visit.num_batches % accumulation:
                raise ValueError(
                    f"a visit of {visit.num_batches} batches is no multiple of trainer.accumulate_grad_batches="
                    f"{accumulation}: one optimizer step would mix two clients"
                )
        ends = list(accumulate(visit.num_batches for visit in visits))
        self._visit_at = dict(zip([0, *ends[:-1]], visits, strict=True))
        self._ends, self._num_batches = set(ends), ends[-1]
        self._data.set_visits(visits, self.rounds_done)

    def _begin_visit(self, trainer: L.Trainer, module: L.LightningModule, visit: Visit) -> None:
        self.visit = visit
        self._client = self.clients[visit.client_id]
        self._client.memory = self.memory.load(visit.client_id)
        payload = self.channel.down(self.algorithm.send(visit, self._client, self._global), self._client)
        self._received, self._bytes_down = payload.state, payload.num_bytes
        started_from = self.algorithm.start_visit(visit, self._client, self._received, module)
        self._trained = {name: self._parameters[name] for name in started_from}
        write(started_from, self._trained)
        forget(trainer.optimizers)
        seed_all(self.seed, "visit", self.rounds_done, visit.client_id, visit.split)
        self._steps, self._losses, self._lr = 0, [], _learning_rate(trainer)
        self._started = time.perf_counter()

    def _add_loss(self, outputs: Any) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            self._losses.append(loss.detach())

    def _finish_visit(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        assert self.visit is not None
        trained = read(self._trained)
        mean_loss = torch.stack(self._losses).mean().item() if self._losses else float("nan")
        work = Work(self._steps, self._lr, mean_loss, time.perf_counter() - self._started)
        reply = self.algorithm.reply(self.visit, self._client, self._received, trained, work)
        payload = self.channel.up(self._received, reply, self._client)
        update = self.algorithm.finish_visit(self.visit, self._client, payload.state, work)
        if update is not None:
            self._aggregation.add(update)
        with full_disk_named(self.memory.folder or Path()):
            self.memory.save(self._client.id, self._client.memory, self.rounds_done)
        self._client.memory = {}
        self.visit_records.append(
            {
                "round": self.rounds_done,
                "client": self.visit.client_id,
                "split": self.visit.split,
                "steps": work.num_steps,
                "examples": self._client.num_examples,
                "loss": work.mean_loss,
                "bytes_down": self._bytes_down,
                "bytes_up": payload.num_bytes,
                "seconds": work.seconds,
            }
        )

    def _finish_round(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        movement = self.algorithm.finish_round(self._aggregation.result())
        write(self.server.step(self._global, movement), self._parameters)
        forget(trainer.optimizers)  # or a checkpoint would carry the last client's moments
        del self._global, self._received, self._trained, self._aggregation
        self.visit, self._inside_round = None, False
        self.rounds_done += 1
        totals = {key: sum(float(r[key]) for r in self.visit_records) for key in ("bytes_down", "bytes_up")}
        losses = [float(r["loss"]) for r in self.visit_records]
        metrics = {"fed/loss": sum(losses) / len(losses), "fed/clients": float(len(self._cohort))}
        metrics |= {f"fed/{key}": value for key, value in (totals | self.algorithm.metrics()).items()}
        module.log_dict(metrics, on_step=False, on_epoch=True, batch_size=1)

    def own_state(self, client_id: str) -> State | None:
        """The parameters with which a client would go on alone; None where they are the global ones."""
        return self.algorithm.own_state(replace(self.clients[client_id], memory=self.memory.load(client_id)))

    def state_dict(self) -> dict[str, Any]:
        """Rounds done, and what algorithm, server and clients remember."""
        return {
            "rounds_done": self.rounds_done,
            "inside_round": self._inside_round,
            "algorithm": self.algorithm.state_dict(),
            "server": self.server.state_dict(),
            "memory": self.memory.state_dict(self.rounds_done),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on after a finished round.

        Raises:
            ValueError: the checkpoint was written inside a round and so holds one client's local weights.
        """
        if state_dict["inside_round"]:
            raise ValueError(
                f"this checkpoint was written inside round {state_dict['rounds_done']} and holds one client's local "
                "weights: resume from one that was written after a round (ModelCheckpoint(every_n_epochs=1))"
            )
        self.rounds_done = state_dict["rounds_done"]
        self.algorithm.load_state_dict(state_dict["algorithm"])
        self.server.load_state_dict(state_dict["server"])
        self.memory.load_state_dict(state_dict["memory"])
        rank_zero_info(f"resuming after round {self.rounds_done}")


def _learning_rate(trainer: L.Trainer) -> float:
    return float(trainer.optimizers[0].param_groups[0]["lr"])
