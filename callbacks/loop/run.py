"""Run of a federated loop as an algorithm sees it, and the metrics of its rounds."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import fmean, median
from typing import Any, Protocol, runtime_checkable

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn

from fedlight.callbacks.loop.parts.buffers import BufferPolicy, named_parts, put, put_back, snapshot
from fedlight.callbacks.loop.parts.part import Part
from fedlight.callbacks.loop.round_table import Record
from fedlight.devices.outcomes import LEFT_OUT, TOO_FEW
from fedlight.federation.algorithm import Aggregation, Algorithm
from fedlight.federation.algorithms.self_made.candidates import MIXED, SYNTHETIC
from fedlight.federation.client import DIVERGED, Client, Payload, State, Visit, Work, write
from fedlight.federation.client_state import ClientMemories
from fedlight.federation.protocols import FederatedData, Federation, HoldsAdapters, LossesOn, SynthesizesData
from fedlight.processes.work import for_each
from fedlight.support.pokes import batch_before_transfer, batch_on_device, training_source
from fedlight.support.seeding import derive_seed, seed_streams
from fedlight.support.torch_parts import eval_mode


class NoDevices:
    """Null object for the clients' devices: this machine trains, and every client gets through every round.

    Args:
        forward_only: whether all visits train by forward passes alone.

    Attributes:
        round_end_seconds: virtual time of the round's end.
    """

    round_end_seconds = 0.0

    def __init__(self, forward_only: bool = False) -> None:
        self._forward_only = forward_only

    def trains_forward(self, visit: Visit) -> bool:
        """Return whether a visit trains by forward passes alone."""
        return self._forward_only

    def present(self, round_idx: int, now_seconds: float, clients: Sequence[Client]) -> list[Client]:
        """Return the clients that are available when a round starts."""
        return [*clients]

    def by_base(self, clients: Sequence[Client]) -> Iterator[list[Client]]:
        """Yield the clients in groups; during each the module computes on the base of the group's devices."""
        if clients:
            yield [*clients]

    def at_server(self) -> AbstractContextManager[None]:
        """Put the server's own base into the module while the body runs, also in a visit to a client."""
        return nullcontext()

    def admit(
        self, round_idx: int, now_seconds: float, visits: Sequence[Visit], parameters: Mapping[str, Tensor]
    ) -> list[Visit]:
        """Return the visits of the clients that get through a round from ``now_seconds`` (virtual time), in training order.

        Only names and shapes of the federated ``parameters`` count.
        """
        return [*visits]

    def kind(self, visit: Visit) -> Hashable:
        """Return the kind of computation of a visit; visits of one kind can be trained side by side, of None only alone."""
        return ()

    def check_parameters(self, parameters: Mapping[str, Tensor]) -> None:
        """Raise ValueError, before the first visit of a round, for other federated parameters than the round's plan has."""

    def device_name(self, client_id: str) -> str:
        """Return the name of the client's device in reports; empty without a device."""
        return ""

    @property
    def device_names(self) -> list[str]:
        """Names of all kinds of devices; none without a fleet."""
        return []

    def fitting_rank(self, client_id: str, ranks: Sequence[int], parameters: Mapping[str, Tensor]) -> int:
        """Return the LoRA rank that fits one pass over a client's data on its device best, see `first_that_fits`.

        The batches are those of such a visit in the first round, and each parameter is trained.
        """
        return max(ranks)

    def dropouts(self, round_idx: int) -> list[Record]:
        """Return a row for each client that was asked and did not get through, with its costs until then."""
        return []

    def enter(self, visit: Visit) -> None:
        """Adapt the module to the client's device, before a visit."""

    def restore(self) -> None:
        """Restore the server's base in the module, after the last visit of a round or a broken one."""

    def visited(self, visit: Visit, row: Record) -> Record:
        """Return the row of a finished visit with its costs on the client's device."""
        return row

    def metrics(self, rows: Sequence[Record]) -> dict[str, float]:
        """Return metrics of a round that is over."""
        return {}


def ready(module: L.LightningModule, batch: Any, device: torch.device | None = None) -> Any:
    """Return a loader's batch as a step of the module receives it, on ``device``, by default the module's.

    Lightning chooses between the datamodule's and the module's ``on_before_batch_transfer``, ``transfer_batch_to_device``
    and ``on_after_batch_transfer``.
    """
    batch = module.trainer.precision_plugin.convert_input(batch)
    return batch_on_device(module, batch_before_transfer(module, batch), device)


@runtime_checkable
class LossPerExample(Protocol):
    """Module with a loss per example."""

    def example_losses(self, batch: Any) -> Tensor:
        """Return one loss per example, ``(batch,)``."""


@runtime_checkable
class ValidatesByClient(Protocol):
    """Datamodule that knows the client of each validation example.

    Attributes:
        val_client_indices: client id -> positions of its examples in the validation loader.
    """

    val_client_indices: Mapping[str, np.ndarray] | None

    def val_dataloader(self) -> Any:
        """Return batches of the validation examples of all clients, always in the same order."""


@runtime_checkable
class ScoresOwnExamples(Protocol):
    """Training data that give the clients' examples in a fixed order, to be scored."""

    def own_examples(self) -> tuple[Iterable[Any], Mapping[str, np.ndarray]]:
        """Return batches of all training examples, always in the same order, and the positions of each client's."""


def client_losses(module: L.LightningModule, data: object, on: LossesOn = "val") -> dict[str, np.ndarray]:
    """Return the loss on each example of a client, ``(examples,)`` fp64, in evaluation mode and without gradients.

    Arguments are checked by `Run.check_losses`.
    """
    assert isinstance(module, LossPerExample)

    def measure(batch: Any) -> Tensor:
        return module.example_losses(ready(module, batch)).cpu().double()

    passes: list[tuple[Iterable[Any], Mapping[str, np.ndarray]]] = []
    if on == "own":
        assert isinstance(data, ScoresOwnExamples)
        passes.append(data.own_examples())
    if isinstance(data, ValidatesByClient) and data.val_client_indices is not None:
        passes.append((data.val_dataloader(), data.val_client_indices))
    parts: dict[str, list[np.ndarray]] = {}
    for batches, positions in passes:
        with torch.no_grad(), eval_mode(module):
            losses = torch.cat(for_each(measure, batches)).numpy()  # several processes share the batches
        for client, places in positions.items():
            parts.setdefault(client, []).append(losses[places])
    return {client: np.concatenate(pieces) for client, pieces in parts.items()}


@contextmanager
def parameters_of(module: torch.nn.Module, state: State) -> Iterator[None]:
    """Put ``state``, parameters and buffers by name, into the module while the body runs; then restore it bit for bit.

    Examples:
        >>> layer = torch.nn.Linear(1, 1)
        >>> with parameters_of(layer, {"bias": torch.tensor([4.0])}):
        ...     layer.bias.item()
        4.0
    """
    parameters = {name: p for name, p in module.named_parameters() if name in state}
    # In their own types, since fp32 could lose bits.
    before = {name: p.detach().clone() for name, p in parameters.items()}
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
class ChecksSettings(Protocol):
    """Algorithm that can refuse settings and data before the module's model is loaded."""

    def check_settings(self, federation: Federation) -> None:
        """Raise ValueError for settings that cannot work; the module's parameters and optimizers are not known yet."""


@runtime_checkable
class StartsRounds(Protocol):
    """Algorithm that does something with the global state when a round begins, such as grouping all clients."""

    def start_round(self, round_idx: int, cohort: Sequence[Client], federation: Federation) -> None:
        """Start a round of a cohort, which is all who get through it; the module holds the global state.

        The round before is validated, logged and saved by now, which it is not in ``prepare_round`` of a run that is
        resumed.
        """


@runtime_checkable
class SharesOut(Protocol):
    """Callback that assigns training examples to clients, such as ``fedlight.ByClient``."""

    def share_out(self, trainer: L.Trainer) -> None:
        """Make the trainer read its training data by client."""


@runtime_checkable
class OpensLater(Protocol):
    """Training data that are known only when Lightning asks for the training loader, after the module's ``setup``."""

    def when_open(self, then: Callable[[], None]) -> None:
        """Call ``then`` once the clients are known."""

    def open(self) -> None:
        """Read the clients, if they are not known yet."""


class Run:
    """`Federation` of a trainer, where what it has in common with others is described.

    The ``loop`` is the `FederatedLoop`; its module imports this one.

    Attributes:
        trainer, lightning_module: those of Lightning's hooks.
        algorithm, seed, buffers, memory: those of the loop.
        state: global parameters at the start of the round's visits; the loop sets it.
        parameters: name -> parameter of the module that is federated; empty before the run begins.
        aggregation: that of the loop; None for the algorithm's own.
        parts: all `Part` of the run.
        planned: planner of the rounds, once the clients are known.
        is_private: whether the run promises differential privacy.
        planned_by_arrival: whether rounds are buffered.
        records: rows of the round so far, of visits and of clients that dropped out.
        devices: the clients' devices.
        gather: function from a value and the name of an exchange to the values of all processes.
        logged: metrics that the algorithm has logged since the last round was over.
        norm: function from the tensors here, by name, to the L2 norm of all; None where they are whole.
        bytes_elsewhere: bytes of the parts of federated parameters in other processes.
    """

    def __init__(self, trainer: L.Trainer, module: L.LightningModule, loop: Any) -> None:
        self.lightning_module = module
        self.module: nn.Module = module
        self.trainer = trainer
        self.algorithm: Algorithm = loop.algorithm
        self.seed: int = loop.seed
        self.memory: ClientMemories = loop.memory
        self.buffers: BufferPolicy = loop.buffers
        self.parameters: dict[str, Tensor] = {}
        self.aggregation: Aggregation | None = loop.aggregation
        self.planned: Any = None
        self.is_private: bool = loop.privacy is not None
        self.planned_by_arrival: bool = loop._buffered is not None
        self.parts: Sequence[Part] = loop._parts
        self._parts_with: dict[Callable[..., Any], list[Part]] = {}
        self.records: list[Record] = []
        self.gather: Callable[[Any, str], list[Any]] = lambda value, what: [value]
        self._loop = loop
        self._checked: list[torch.optim.Optimizer] = []
        self.num_rounds = trainer.max_epochs or 0
        self.clients: Mapping[str, Client] = loop.clients
        self.robust = loop.aggregation is not None
        self.has_fleet: bool = loop.fleet is not None and bool(loop.fleet.devices)
        self.train, self.channel, self.server = loop.train, loop.channel, loop.server
        self.state = State()
        self.data: object = federated_data(trainer)
        self._validation: object = trainer.datamodule  # type: ignore[attr-defined]
        self.devices = NoDevices(loop.train == "forward")
        self.logged: dict[str, float] = {}
        self.norm: Callable[[State], float] | None = None
        self.bytes_elsewhere = 0

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return self.trainer.optimizers

    @property
    def round_idx(self) -> int:
        """Number of rounds with a finished server step."""
        done: int = self._loop.rounds_done
        return done

    def parts_with(self, hook: Callable[..., Any]) -> list[Part]:
        """Return the parts that override a hook such as ``Part.enter``, in their order."""
        if hook not in self._parts_with:
            parts = [part for part in self.parts if getattr(type(part), hook.__name__) is not hook]
            self._parts_with[hook] = parts
        return self._parts_with[hook]

    def call(self, hook: Callable[..., Any], *values: Any) -> None:
        """Call a hook of all parts that override it."""
        for part in self.parts_with(hook):
            getattr(part, hook.__name__)(self, *values)

    def check(self, algorithm: Algorithm) -> None:
        """Let the algorithm check the run once, and again when the trainer has other optimizers."""
        if self._checked != [*self.optimizers]:  # a callback may replace them between rounds
            self.check_settings(algorithm)
            algorithm.check(self)
            self._checked = [*self.optimizers]

    def check_settings(self, algorithm: Algorithm) -> None:
        """Let the algorithm check the settings before the module's model is loaded."""
        if isinstance(algorithm, ChecksSettings):
            algorithm.check_settings(self)

    def broadcast(self, state: State) -> Payload:
        return self.channel.down(state, next(iter(self.clients.values())))  # a channel treats all alike

    def log(self, metrics: Mapping[str, float]) -> None:
        self.logged.update(metrics)

    def check_losses(self, on: LossesOn) -> None:
        module, data = self.lightning_module, self._validation
        if not isinstance(module, LossPerExample):
            raise ValueError(
                f"{type(module).__name__} has no method example_losses(batch) -> (batch,), by which clients are scored: add "
                "it, or take an algorithm that does not group clients"
            )
        if on == "own" and not isinstance(data, ScoresOwnExamples):
            raise ValueError(
                f"{type(data).__name__} cannot give the clients' training examples in a fixed order, on which they are "
                "scored: derive it from FederatedDataModule, or set group_by=val"
            )
        is_read = self.planned is not None  # before, it is not known which validation examples there are
        if (
            on == "val"
            and is_read
            and (not isinstance(data, ValidatesByClient) or data.val_client_indices is None)
        ):
            raise ValueError(
                "the datamodule has no validation examples by client, on which they are scored: set data.split.val_share "
                "above 0 and no data.split.val_source, or group_by=own"
            )

    def client_losses(self, on: LossesOn) -> dict[str, np.ndarray]:
        return client_losses(self.lightning_module, self._validation, on)

    def adapter_losses(self, on: LossesOn, adapters: Sequence[str]) -> list[dict[str, np.ndarray]]:
        losses = []
        for name in adapters:
            assert isinstance(self.lightning_module, HoldsAdapters)
            self.lightning_module.use_adapter(name)
            losses.append(self.client_losses(on))
        return losses

    def holding(self, state: State) -> AbstractContextManager[None]:
        return parameters_of(self.lightning_module, state)

    @contextmanager
    def at_server(self, state: State) -> Iterator[None]:
        """Put ``state`` and the server's own base into the module while the body runs, also during a visit."""
        with self.devices.at_server(), self.holding(state):
            yield

    def own_state(self, client_id: str) -> State | None:
        state: State | None = self._loop.own_state(client_id)
        return state

    def by_base(self, clients: Sequence[Client]) -> Iterator[list[Client]]:
        return self.devices.by_base(clients)

    def num_examples(self, visit: Visit) -> int:
        """Return the number of examples that a visit trains on: the client's own, its synthetic ones, or both."""
        private = self.clients[visit.client_id].num_examples
        if visit.split not in (SYNTHETIC, MIXED):
            return private
        assert isinstance(self.data, SynthesizesData)
        made = self.data.num_synthetic(visit.client_id)
        return made if visit.split == SYNTHETIC else private + made


def training_data(trainer: L.Trainer) -> object:
    """Return the source of training batches: a project's own loader read by client, or the datamodule."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, SharesOut):  # fedlight.ByClient
            callback.share_out(trainer)
    source = training_source(trainer)
    return source if isinstance(source, FederatedData) else trainer.datamodule  # type: ignore[attr-defined]


def federated_data(trainer: L.Trainer) -> FederatedData:
    """Return the source of training batches; raise ValueError if it does not know the client of each example."""
    data = training_data(trainer)
    if not isinstance(data, FederatedData):
        who = "the training loader" if data is None else f"the datamodule {type(data).__name__}"
        raise ValueError(
            f"{who} does not say whose example is whose: add ByClient(clients) to the trainer's callbacks, wrap the "
            "datamodule, FederatedWrapper(datamodule, clients=...), or derive it from FederatedDataModule"
        )
    return data


def clear_gradients(module: nn.Module) -> None:
    """Delete all gradients of an earlier visit, also in a module that clears its gradients itself."""
    for _, part in named_parts(module):
        for parameter in part._parameters.values():
            if parameter is not None:
                parameter.grad = None


def seed_all(*parts: int | str) -> None:
    """Seed every global random stream by ``parts``, which name the purpose."""
    seed_streams(derive_seed(*parts))


NO_WORK = Work(0, 0.0, None, 0.0)
"""Work of a visit that was not made."""


def visit_row(
    round_idx: int,
    visit: Visit,
    num_examples: int,
    work: Work,
    bytes_down: int,
    bytes_up: int,
    reason: str = "",
    lora_rank: int | None = None,
) -> Record:
    """Return the row of a visit; one that is left out has a reason and no loss, which would be NaN."""
    row: Record = {
        "round": round_idx,
        "client": visit.client_id,
        "split": visit.label,
        "steps": work.num_steps,
        "examples": num_examples,
        "loss": "" if reason or work.mean_loss is None else work.mean_loss,
        "bytes_down": bytes_down,
        "bytes_up": bytes_up,
        "seconds": work.seconds,
        "reason": reason,
    }
    return row if lora_rank is None else row | {"lora_rank": lora_rank}


def round_metrics(rows: Sequence[Record], num_clients: int, reported: bool = False) -> dict[str, float]:
    """Return metrics of a round: mean loss of its visits if known, clients that took part or diverged, bytes.

    If visits were on different kinds of data, ``loss/SPLIT`` is the mean loss on each. Losses that are ``reported`` by
    clients who may lie have their median in the place of their mean.
    """
    average = median if reported else fmean
    losses: dict[str, list[float]] = {}
    for row in rows:
        for name in ("loss", f"loss/{row['split']}") if row["loss"] != "" else ():
            losses.setdefault(name, []).append(float(row["loss"]))
    several = len(losses) > 2  # one split alone has the loss of the round
    loss = {name: average(each) for name, each in losses.items() if several or name == "loss"}
    totals = {name: float(sum(int(row[name]) for row in rows)) for name in ("bytes_down", "bytes_up")}
    diverged, *left_out = (
        len({row["client"] for row in rows if reason in str(row["reason"]).split("+")})
        for reason in (DIVERGED, LEFT_OUT, TOO_FEW)
    )
    counts = {"clients": float(num_clients - diverged - sum(left_out)), "diverged": float(diverged)}
    return {**loss, **counts, **totals}


def log_round(
    trainer: L.Trainer, module: L.LightningModule, metrics: Mapping[str, float], training: Mapping[str, float]
) -> None:
    """Log the metrics of a round as ``fed/NAME``, and means of training metrics as ``train/NAME``."""
    if trainer.barebones:  # a barebones trainer warns about logging
        return
    named = {f"fed/{name}": value for name, value in metrics.items()}
    # The sum of one value is its mean, in less time. Without a batch size Lightning looks for one in the batch.
    module.log_dict(named, on_step=False, on_epoch=True, reduce_fx="sum", batch_size=1)
    for name, value in training.items():
        shown = name == "loss"
        module.log(f"train/{name}", value, prog_bar=shown, on_step=False, on_epoch=True, batch_size=1)
