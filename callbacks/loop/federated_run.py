"""The run under a federated loop: what an algorithm sees of it, and the small acts between visits."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, runtime_checkable

import lightning as L
import torch
from torch import nn

from fedlight.callbacks.loop.client_losses import ValidatesByClient, check_client_losses, client_losses
from fedlight.callbacks.loop.own_models import parameters_of
from fedlight.callbacks.loop.round_table import Row
from fedlight.callbacks.loop.same_machine import SameMachine
from fedlight.federation.algorithm import Algorithm
from fedlight.federation.candidates import MIXED, SYNTHETIC
from fedlight.federation.channel import Channel, Payload
from fedlight.federation.client import Client, Visit, Work
from fedlight.federation.protocols import FederatedData, SynthesizesData
from fedlight.federation.state import DIVERGED, State
from fedlight.support.seeding import derive_seed


@runtime_checkable
class SharesOut(Protocol):
    """A callback that says whose the training examples are, such as ``fedlight.ByClient``."""

    def share_out(self, trainer: L.Trainer) -> None:
        """Has the trainer read its training data by client."""


@runtime_checkable
class OpensLater(Protocol):
    """Training data that are there only when Lightning asks for the training loader, behind the ``setup`` of the module."""

    def when_open(self, then: Callable[[], None]) -> None:
        """Has this done once the clients are known."""

    def open(self) -> None:
        """Makes the clients known, if they are not."""


class Run:
    """The :class:`~fedlight.federation.protocols.Federation` of a trainer.

    Args:
        trainer: that runs.
        module: what it trains.
        clients: all clients by id.
        channel: to the clients.
        robust: a robust aggregation takes the place of the algorithm's own.
        own_state: the parameters with which a client would go on alone, by its id.

    Attributes:
        devices: on which the clients train.
        logged: what the algorithm has logged since the last round was over.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        clients: Mapping[str, Client],
        channel: Channel,
        robust: bool,
        own_state: Callable[[str], State | None],
    ) -> None:
        self.lightning_module = module
        self.module: nn.Module = module
        self._trainer = trainer
        self._checked: list[torch.optim.Optimizer] = []
        self.num_rounds = trainer.max_epochs or 0
        self.clients = clients
        self.robust = robust
        self.data: object = federated_data(trainer)
        self._validation: object = trainer.datamodule  # type: ignore[attr-defined]
        self.devices = SameMachine()
        self.logged: dict[str, float] = {}
        self._channel = channel
        self._own_state = own_state

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """Those that the trainer has now; a callback may give it others between rounds."""
        return self._trainer.optimizers

    def check(self, algorithm: Algorithm) -> None:
        """Has the algorithm refuse what it cannot work with: once, and again where the trainer has got other optimizers."""
        if self._checked != [*self.optimizers]:
            algorithm.check(self)
            self._checked = [*self.optimizers]

    def broadcast(self, state: State) -> Payload:
        """What every client receives of a state that is sent to all of them; a channel treats them alike."""
        return self._channel.down(state, next(iter(self.clients.values())))

    def log(self, metrics: Mapping[str, float]) -> None:
        """Log values with the round, as ``fed/NAME``."""
        self.logged.update(metrics)

    def check_validation(self) -> None:
        """Raises ``ValueError`` where clients cannot be scored."""
        check_client_losses(self.lightning_module, self._validation)

    def validation_losses(self) -> dict[str, float]:
        """Mean loss of each client's validation examples, the module as it stands."""
        assert isinstance(self._validation, ValidatesByClient)
        return client_losses(self.lightning_module, self._validation)

    def holding(self, state: State) -> AbstractContextManager[None]:
        """Has ``state`` in the module while its body runs; then it holds what it held before, bit for bit."""
        return parameters_of(self.lightning_module, state)

    @contextmanager
    def at_server(self, state: State) -> Iterator[None]:
        """The same on the server's own base, also in a visit to a client whose device has another."""
        with self.devices.at_server(), self.holding(state):
            yield

    def own_state(self, client_id: str) -> State | None:
        """The parameters with which a client would go on alone; None for the global ones."""
        return self._own_state(client_id)

    def by_base(self, clients: Sequence[Client]) -> Iterator[list[Client]]:
        """The clients in groups; while a group is looked at, the module computes on the base that its devices have."""
        return self.devices.by_base(clients)

    def num_examples(self, visit: Visit) -> int:
        """How many of the client's examples a visit trains on: its own, those that it made, or both."""
        own = self.clients[visit.client_id].num_examples
        if visit.split not in (SYNTHETIC, MIXED):
            return own
        assert isinstance(self.data, SynthesizesData)
        made = self.data.num_synthetic(visit.client_id)
        return made if visit.split == SYNTHETIC else own + made


def training_data(trainer: L.Trainer) -> object:
    """Who gives the training batches: the source that reads a project's own loader by client, or the datamodule."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, SharesOut):
            callback.share_out(trainer)
    source = trainer.fit_loop._data_source
    return source if isinstance(source, FederatedData) else trainer.datamodule  # type: ignore[attr-defined]


def federated_data(trainer: L.Trainer) -> FederatedData:
    """The same, which is to know whose example is whose.

    Raises:
        ValueError: it does not.
    """
    data = training_data(trainer)
    if not isinstance(data, FederatedData):
        who = "the training loader" if data is None else f"the datamodule {type(data).__name__}"
        raise ValueError(
            f"{who} does not say whose example is whose: add ByClient(clients) to the trainer's callbacks, wrap the "
            "datamodule, FederatedWrapper(datamodule, clients=...), or derive it from FederatedDataModule"
        )
    return data


def clear_gradients(module: nn.Module) -> None:
    """Leaves no gradient of an earlier visit behind, also where the module clears its gradients itself."""
    for parameter in module.parameters():
        parameter.grad = None


def seed_all(*parts: int | str) -> None:
    """Seeds every global random stream with what it is for."""
    L.seed_everything(derive_seed(*parts), verbose=False)


def visit_row(
    round_idx: int,
    visit: Visit,
    num_examples: int,
    work: Work,
    bytes_down: int,
    bytes_up: int,
    reason: str = "",
) -> Row:
    """What is logged of a finished visit; of one that is left out for a reason no loss, which would not be a number."""
    return {
        "round": round_idx,
        "client": visit.client_id,
        "split": visit.split,
        "steps": work.num_steps,
        "examples": num_examples,
        "loss": "" if reason or work.mean_loss is None else work.mean_loss,
        "bytes_down": bytes_down,
        "bytes_up": bytes_up,
        "seconds": work.seconds,
        "reason": reason,
    }


def round_metrics(rows: Sequence[Row], num_clients: int) -> dict[str, float]:
    """What is logged of a round: mean loss of its visits, clients that took part, bytes; no loss where none is known.

    Those of ``num_clients`` that diverged are counted on their own. Where visits were on different kinds of data, also the
    mean loss on each, as ``loss/SPLIT``.
    """
    losses: dict[str, list[float]] = {}
    for row in rows:
        for name in ("loss", f"loss/{row['split']}") if row["loss"] != "" else ():
            losses.setdefault(name, []).append(float(row["loss"]))
    several = len(losses) > 2
    loss = {name: math.fsum(each) / len(each) for name, each in losses.items() if several or name == "loss"}
    totals = {name: float(sum(int(row[name]) for row in rows)) for name in ("bytes_down", "bytes_up")}
    diverged = len({row["client"] for row in rows if row["reason"] == DIVERGED})
    counts = {"clients": float(num_clients - diverged), "diverged": float(diverged)}
    return {**loss, **counts, **totals}
