"""The run under a federated loop: what an algorithm sees of it, and what is logged of its rounds."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, runtime_checkable

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn

from fedlight.callbacks.loop.buffers import put, put_back, snapshot
from fedlight.callbacks.loop.round_table import Row
from fedlight.federation.aggregation import Aggregation
from fedlight.federation.algorithm import Algorithm
from fedlight.federation.candidates import MIXED, SYNTHETIC
from fedlight.federation.channel import Channel, Payload
from fedlight.federation.client import Client, Visit, Work
from fedlight.federation.privacy import Private
from fedlight.federation.protocols import FederatedData, SynthesizesData
from fedlight.federation.state import DIVERGED, State, write
from fedlight.support.seeding import derive_seed
from fedlight.support.torch_parts import eval_mode


class NoDevices:
    """What the federated loop asks of the clients' devices, where they are none: everybody gets through every round.

    Attributes:
        round_end_seconds: virtual time at which the round ends.
    """

    round_end_seconds = 0.0

    def present(self, round_idx: int, now_seconds: float, clients: Sequence[Client]) -> list[Client]:
        """Those of them who are there when a round starts that is asked of them; the others are absent from it."""
        return [*clients]

    def by_base(self, clients: Sequence[Client]) -> Iterator[list[Client]]:
        """The clients in groups; while a group is looked at, the module computes on the base that its devices have."""
        if clients:
            yield [*clients]

    def at_server(self) -> AbstractContextManager[None]:
        """Has the server's own base under the module while its body runs, also in a visit to a client."""
        return nullcontext()

    def admit(
        self, round_idx: int, now_seconds: float, visits: Sequence[Visit], parameters: Mapping[str, Tensor]
    ) -> list[Visit]:
        """The visits of those who get through the round, in the order in which they are trained.

        Args:
            round_idx: the round.
            now_seconds: virtual time at which it starts.
            visits: of all who are asked.
            parameters: that are federated, of which names and shapes count alone.
        """
        return [*visits]

    def check_parameters(self, parameters: Mapping[str, Tensor]) -> None:
        """Before the first visit of a round: refuses other federated parameters than those that were planned with."""

    def device_name(self, client_id: str) -> str:
        """What reports call the client's device."""
        return ""

    def dropouts(self, round_idx: int) -> list[Row]:
        """A row for each client that was asked and did not get through, with what it spent until then."""
        return []

    def enter(self, visit: Visit) -> None:
        """Before a visit: makes the module what it is on the client's device."""

    def restore(self) -> None:
        """After the last visit of a round, or when one was broken off: the server has its own module back."""

    def visited(self, visit: Visit, row: Row) -> Row:
        """The row of a finished visit, with what it took on the client's device."""
        return row

    def metrics(self, rows: Sequence[Row]) -> dict[str, float]:
        """What is logged of a round that is over."""
        return {}


def ready(module: L.LightningModule, batch: Any, device: torch.device | None = None) -> Any:
    """What a step of the module is given for a batch of a loader.

    The hooks ``on_before_batch_transfer``, ``transfer_batch_to_device`` and ``on_after_batch_transfer`` are those of the
    trainer's datamodule or of the module, as Lightning chooses between them.

    Args:
        module: that a trainer runs.
        batch: as a loader gives it.
        device: where it is to be; the module's if not given.
    """
    batch = module.trainer.precision_plugin.convert_input(batch)
    return module._apply_batch_transfer_handler(module._on_before_batch_transfer(batch), device)


@runtime_checkable
class LossPerExample(Protocol):
    """What is needed of the module."""

    def example_losses(self, batch: Any) -> Tensor:
        """One loss per example, ``(batch,)``."""


@runtime_checkable
class ValidatesByClient(Protocol):
    """What is needed of the datamodule.

    Attributes:
        val_client_indices: client id -> positions of its examples in the validation loader.
    """

    val_client_indices: Mapping[str, np.ndarray] | None

    def val_dataloader(self) -> Any:
        """The validation examples of all clients, always in the same order."""


def check_client_losses(module: L.LightningModule, data: object) -> None:
    """Raises ``ValueError`` where there is no loss per example, or no validation example by client."""
    if not isinstance(module, LossPerExample):
        raise ValueError(
            f"{type(module).__name__} has no method example_losses(batch) -> (batch,), by which clients are scored: add "
            "it, or take an algorithm that does not group clients"
        )
    if not isinstance(data, ValidatesByClient) or data.val_client_indices is None:
        raise ValueError(
            "the datamodule has no validation examples by client, on which they are scored: set data.val_share "
            "above 0 and no data.val_source"
        )


def client_losses(module: L.LightningModule, data: ValidatesByClient) -> dict[str, float]:
    """Mean loss of each client's validation examples, in evaluation mode and without gradients."""
    assert isinstance(module, LossPerExample)
    with torch.no_grad(), eval_mode(module):
        found = [
            module.example_losses(ready(module, batch)).double().cpu() for batch in data.val_dataloader()
        ]
    losses = torch.cat(found).numpy()
    assert data.val_client_indices is not None
    return mean_by_client(losses, data.val_client_indices)


def mean_by_client(values: np.ndarray, indices: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Mean of each client's values.

    Args:
        values: one per example, ``(examples,)``.
        indices: client id -> its examples.

    Example:
        >>> mean_by_client(np.array([1.0, 2.0, 6.0]), {"u": np.array([0, 2]), "v": np.array([1])})
        {'u': 3.5, 'v': 2.0}
    """
    return {client: float(values[own].mean()) for client, own in indices.items()}


@contextmanager
def parameters_of(module: torch.nn.Module, state: State) -> Iterator[None]:
    """Has ``state``, parameters and buffers by name, in the module while its body runs.

    Example:
        >>> layer = torch.nn.Linear(1, 1)
        >>> before = layer.bias.item()
        >>> with parameters_of(layer, {"bias": torch.tensor([4.0])}):
        ...     layer.bias.item()
        4.0
        >>> layer.bias.item() == before
        True
    """
    parameters = {name: p for name, p in module.named_parameters() if name in state}
    before = {name: p.detach().clone() for name, p in parameters.items()}  # as they are: fp32 could lose bits
    buffers = {name: value for name, value in state.items() if name not in parameters}
    buffers_before = snapshot(module) if buffers else {}
    write({name: state[name] for name in parameters}, parameters)
    put(module, buffers)
    try:
        yield
    finally:
        write(before, parameters)
        if buffers:
            put_back(module, buffers_before)


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
        self.devices = NoDevices()
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


class PrivacyAccount:
    """Counts the rounds, and says epsilon after them.

    Args:
        aggregation: of the run; None for an algorithm's own, which is not private.
        channel: of the run.

    Attributes:
        rounds: clients sampled and clients of each round; plain values, for a checkpoint.

    Raises:
        ModuleNotFoundError: something is private and the accountant is not installed.
    """

    def __init__(self, aggregation: Aggregation | None, channel: Channel) -> None:
        self.rounds: list[tuple[int, int]] = []
        self._parts: dict[str, tuple[Private, float]] = {}
        parts: dict[str, object] = {"": aggregation, "_local": channel}
        for end, part in parts.items():
            if isinstance(part, Private) and part.delta is not None:
                part.epsilon(part.delta, [])  # asks whether the accountant is installed
                self._parts[end] = part, part.delta

    @property
    def is_private(self) -> bool:
        """Whether something of the run promises differential privacy."""
        return bool(self._parts)

    def check(self, clients: int) -> None:
        """Refuses a delta that promises too little.

        Raises:
            ValueError: it is one over the number of clients or more, so that giving away one of them whole would be private.
        """
        for part, delta in self._parts.values():
            if delta * clients >= 1:
                raise ValueError(
                    f"{type(part).__name__}: delta={delta:g} is not below one over the {clients:,} clients, so that giving "
                    f"away all that one of them holds would count as private: set it to {0.1 / clients:.0e} or less"
                )

    def after_round(self, sampled: int, clients: int) -> dict[str, float]:
        """Counts a round, and gives epsilon after it.

        Args:
            sampled: clients that were asked, also those that dropped out.
            clients: clients that could have been.

        Returns:
            ``epsilon`` and ``delta`` towards those who see the models, ``epsilon_local`` and ``delta_local`` towards the
            server; absent where nothing is private.
        """
        if self._parts:
            self.rounds.append((sampled, clients))
        found: dict[str, float] = {}
        for end, (part, delta) in self._parts.items():
            epsilon = part.epsilon(delta, self.rounds)
            if epsilon is not None:
                found |= {f"epsilon{end}": epsilon, f"delta{end}": delta}
        return found
