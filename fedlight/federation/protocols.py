"""Protocols between algorithm, loop, module and data of a federation, and checks of what an algorithm cannot work with."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn

from fedlight.federation.client import Channel, Client, Group, Payload, State, Visit

LossesOn = Literal["val", "own"]
"""A client's examples on which it is scored: its validation examples, or all of its own."""


class Federation(Protocol):
    """Run between visits: the module holds the global state.

    Attributes:
        module: module that is trained.
        num_rounds: rounds of the whole run.
        clients: all clients by id, also those that do not take part in the round.
        robust: whether a robust aggregation replaces the algorithm's own.
        has_fleet: whether clients have emulated devices.
        state: the global parameters (fp32) that the visits of the round start from; before the first round there are none.
        train: how clients train: ``backprop``, ``forward``, or ``auto`` for either.
        channel: way of the messages.
        server: server's optimizer.
        data: the clients' data; an algorithm states its needs as a Protocol.
    """

    module: nn.Module
    num_rounds: int
    clients: Mapping[str, Client]
    robust: bool
    has_fleet: bool
    state: State
    train: str
    channel: Channel
    server: Any  # a ServerOptimizer, whose file imports this one
    data: object

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """Optimizers of the module, with the learning rates of the round."""

    def broadcast(self, state: State) -> Payload:
        """Return a state as every client receives it, and its bytes per client."""

    def holding(self, state: State) -> AbstractContextManager[None]:
        """Put ``state`` into the module while the body runs, then restore its tensors from before, bit for bit."""

    def own_state(self, client_id: str) -> State | None:
        """Return the parameters that a client would go on with alone; None for the global ones."""

    def log(self, metrics: Mapping[str, float]) -> None:
        """Log values with the round, as ``fed/NAME``; of two under one name the later counts."""

    def by_base(self, clients: Sequence[Client]) -> Iterator[list[Client]]:
        """Yield the clients in groups; during each the module computes on the base of the group's devices.

        Without emulated devices that is one group, on the module as it is.
        """

    def check_losses(self, on: LossesOn) -> None:
        """Raise ValueError if clients cannot be scored: no examples by client, or no loss per example."""

    def client_losses(self, on: LossesOn) -> dict[str, np.ndarray]:
        """Return the module's loss on each of a client's examples, ``(examples,)`` fp64, in one pass over all clients.

        Args:
            on: ``val``, its validation examples; ``own``, its training examples and, where there are some, these.
        """

    def adapter_losses(self, on: LossesOn, adapters: Sequence[str]) -> list[dict[str, np.ndarray]]:
        """Return `client_losses` under each of these adapters of the module; the last stays active.

        Where clients are in separate processes, a client whose losses are needed as a mean alone may have one, their mean.
        """


@runtime_checkable
class TrainsRounds(Protocol):
    """Callback that trains in rounds, such as ``fedlight.FederatedLoop``.

    Attributes:
        clients_per_round: clients sampled in a round.
        rounds_done: rounds whose server step is done.
    """

    clients_per_round: int
    rounds_done: int


@runtime_checkable
class HoldsAdapters(Protocol):
    """Module with one or several adapters; one at a time computes and learns."""

    @property
    def adapter_names(self) -> Sequence[str]:
        """Names of the adapters; each trained parameter has one of them among the parts of its dotted name."""

    def use_adapter(self, name: str) -> None:
        """Activate one adapter, which computes and learns; all of them stay trainable."""


@runtime_checkable
class NamesGroups(Protocol):
    """Data with a known group of each client: client id -> group; None without such a column."""

    client_groups: Mapping[str, str] | None


class NumBatches(Protocol):
    """Function that says how many batches a visit has."""

    def __call__(self, client_id: str, split: str = "train") -> int:
        """Return the batches of a visit to the client on its data of ``split``."""


@runtime_checkable
class FederatedData(Protocol):
    """Datamodule of a federation: it knows whose example is whose, and gives batches visit after visit."""

    def client_sizes(self) -> dict[str, int]:
        """Return the number of training examples of each client, after ``setup("fit")``."""

    def num_batches(self, client_id: str, split: str = "train") -> int:
        """Return the batches in one pass over the client's data of ``split``."""

    def set_visits(self, visits: Sequence[Visit], round_idx: int) -> None:
        """Let the next training loader stream these visits in this order.

        The batches of a visit follow from its client and from ``visit.asked_in(round_idx)``: its costs are counted when the
        client is asked, which with ``federated.fleet.buffered`` may be rounds before it is trained.
        """


@runtime_checkable
class StreamsGroups(Protocol):
    """Federated data whose batches may hold the examples of several clients, for `FederatedLoop.clients_at_once`."""

    def set_groups(self, groups: Sequence[Group], round_idx: int) -> None:
        """Let the next training loader stream these groups of visits in this order.

        Batch j of a group has the examples of batch j of each of its visits, one visit's after the other's.
        """

    def next_counts(self) -> list[int]:
        """Return the number of examples of each visit in the next batch of a group of several visits, in its order.

        It is called once for each such batch, in the order of the batches, also where loader processes read ahead.
        """


@runtime_checkable
class SynthesizesData(Protocol):
    """Data whose clients make candidates for training and choose among them; candidates stay with the client.

    Candidates are a function of the round, the client, its own examples and the module as it stands. No random stream is
    advanced, and the module keeps its mode.
    """

    def synthesize(self, round_idx: int, client_ids: Sequence[str], module: nn.Module) -> None:
        """Make new candidates for these clients, to be trained on in this round, with the module as it stands.

        It may be called several times in a round, each time for other clients, whose devices or own models differ.
        Candidates of an earlier round are dropped, those of other clients in the same round stay.
        """

    def choose(self, client_id: str, module: nn.Module) -> None:
        """Score the client's candidates by the module as it stands and keep the best; no pass is made if all are kept.

        It is called before the first batch of the client's visit is asked for.
        """

    def num_synthetic(self, client_id: str) -> int:
        """Return how many examples ``choose`` keeps, or will keep; 0 for a client without candidates."""

    def synthesis_metrics(self) -> dict[str, float]:
        """Return counts over all candidates of the last round that has some."""

    def reset_synthesis(self) -> None:
        """Drop the candidates of all clients."""


@runtime_checkable
class SynthesizesByOwnModels(Protocol):
    """Data whose clients may make their candidates side by side, each with its own model."""

    def synthesize_by_own_models(
        self,
        round_idx: int,
        states: Mapping[str, State],
        module: nn.Module,
        holding: Callable[[State], AbstractContextManager[None]],
    ) -> None:
        """Make new candidates for these clients, as ``synthesize`` does for one with its state in the module.

        Args:
            round_idx: round that trains on them.
            states: client -> tensors of its model in place of the module's parameters.
            module: module as it stands.
            holding: function that puts a state into the module while its context lasts.
        """


@runtime_checkable
class ScoresTogether(Protocol):
    """Data whose processes share the scores by one model of several clients' candidates, before a round."""

    def score_together(self, client_ids: Sequence[str], module: nn.Module) -> None:
        """Score the candidates of these clients for the calls of ``choose`` that follow.

        All processes of a team call it together. A model of one client's own scores inside of its visit, without it.
        """


@runtime_checkable
class GathersChoices(Protocol):
    """Data whose clients choose among their candidates in several processes."""

    def choices_made(self) -> dict[str, Any]:
        """Return what ``choose`` has changed in this round, as plain values."""

    def add_choices(self, choices: Mapping[str, Any]) -> None:
        """Take the result of ``choices_made`` in one of the processes, this one's among them."""


@runtime_checkable
class KnowsBaseBits(Protocol):
    """Module whose results depend on the bits of its base (16, 8 or 4; None as it was loaded), which a device may change."""

    base_bits: int | None


def optimized_parameters(federation: Federation) -> dict[str, nn.Parameter]:
    """Return the parameters that the optimizers hold, by name: those alone are federated."""
    held = {id(p) for each in federation.optimizers for group in each.param_groups for p in group["params"]}
    return {name: p for name, p in federation.module.named_parameters() if id(p) in held}


def refuse_odd_steps(optimizers: Sequence[torch.optim.Optimizer], algorithm: str) -> None:
    """Raise ValueError for optimizers under which a term that ``algorithm`` adds to gradients has another meaning."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if group.get("line_search_fn") is not None:  # it compares losses, which lack that term
                raise ValueError(
                    f"{algorithm} changes gradients and not the loss, which {type(optimizer).__name__} with line_search_fn="
                    f"{group['line_search_fn']!r} searches along: set line_search_fn=None, or take another optimizer"
                )
            if group.get("maximize"):  # it would step against that term
                raise ValueError(
                    f"{algorithm} adds to the gradients of a loss that is minimized, and {type(optimizer).__name__} has "
                    "maximize=True: return the negative loss and leave maximize out"
                )


def refuse_several_adapters(module: nn.Module, algorithm: str) -> None:
    """Raise ValueError for a module with several adapters: ``algorithm`` would train the active one alone."""
    if isinstance(module, HoldsAdapters) and len(module.adapter_names) > 1:
        raise ValueError(
            f"the module has {len(module.adapter_names)} adapters, of which {algorithm} would train one: set "
            "model.num_adapters=1, or take an algorithm that shares the clients out among adapters, such as FedBiscuit"
        )


def adapter_numbers(module: nn.Module, algorithm: str) -> tuple[list[str], dict[str, int]]:
    """Return a module's adapters, and trained parameter -> number of its adapter.

    Raises:
        ValueError: the module has no adapters, or a trained parameter has none or two.
    """
    if not isinstance(module, HoldsAdapters):
        raise ValueError(
            f"{algorithm} trains several adapters of one module, and {type(module).__name__} has no adapter_names and "
            "use_adapter: derive it from LanguageModule, or add both (docs/own_module.md has an example)"
        )
    adapters, numbers = [*module.adapter_names], dict[str, int]()
    for name in (name for name, p in module.named_parameters() if p.requires_grad):
        # By whole parts: adapter1 is no part of adapter10.
        owners = [number for number, adapter in enumerate(adapters) if adapter in name.split(".")]
        if len(owners) != 1:
            raise ValueError(
                f"{name} is trained and belongs to no single adapter: every group would change it"
            )
        numbers[name] = owners[0]
    return adapters, numbers
