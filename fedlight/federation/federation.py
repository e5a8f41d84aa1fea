"""What an algorithm sees of the run that it is in; the federated loop gives it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from fedlight.federation.channel import Payload
from fedlight.federation.client import Client
from fedlight.federation.state import State


class Federation(Protocol):
    """The run, between visits: the module holds the global state.

    Attributes:
        module: what is trained.
        optimizers: its optimizers, whose learning rates are those of the round.
        num_rounds: rounds of the whole run.
        clients: all clients by id, whether they take part in the round or not.
        robust: a robust aggregation takes the place of the algorithm's own.
        data: the clients' data; what an algorithm needs of it is a Protocol.
    """

    module: nn.Module
    num_rounds: int
    clients: Mapping[str, Client]
    robust: bool
    data: object

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """See above."""

    def broadcast(self, state: State) -> Payload:
        """What every client receives of a state that is sent to all of them, and its bytes per client."""

    def holding(self, state: State) -> AbstractContextManager[None]:
        """Has ``state`` in the module while its body runs; then it holds what it held before, bit for bit."""

    def own_state(self, client_id: str) -> State | None:
        """The parameters with which a client would go on alone; None for the global ones."""

    def by_base(self, clients: Sequence[Client]) -> Iterator[list[Client]]:
        """The clients in groups; while a group is looked at, the module computes on the base that its devices have.

        Where no devices are emulated that is one group, on the module as it is.
        """

    def check_validation(self) -> None:
        """Refuses a run in which clients cannot be scored, before any work.

        Raises:
            ValueError: the data have no validation examples by client, or the module has no loss per example.
        """

    def validation_losses(self) -> dict[str, float]:
        """Mean loss over each client's validation examples, the module as it stands, in one pass over all of them."""


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
    """A module with one or several adapters, of which one at a time computes and learns.

    Attributes:
        adapter_names: of its adapters; each trained parameter has one of them among the parts of its dotted name.
    """

    @property
    def adapter_names(self) -> Sequence[str]:
        """See above."""

    def use_adapter(self, name: str) -> None:
        """Makes one adapter the one that computes and learns; all of them stay trainable."""


def refuse_odd_steps(optimizers: Sequence[torch.optim.Optimizer], algorithm: str) -> None:
    """Raises ``ValueError`` for optimizers under which a term that ``algorithm`` adds to gradients means something else.

    A line search compares losses, which do not have that term; a maximizing optimizer would go against it.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if group.get("line_search_fn") is not None:
                raise ValueError(
                    f"{algorithm} changes gradients and not the loss, which {type(optimizer).__name__} with line_search_fn="
                    f"{group['line_search_fn']!r} searches along: set line_search_fn=None, or take another optimizer"
                )
            if group.get("maximize"):
                raise ValueError(
                    f"{algorithm} adds to the gradients of a loss that is minimized, and {type(optimizer).__name__} has "
                    "maximize=True: return the negative loss and leave maximize out"
                )


def refuse_several_adapters(module: nn.Module, algorithm: str) -> None:
    """Raises ``ValueError`` for a module with several adapters, of which ``algorithm`` would train the active one alone."""
    if isinstance(module, HoldsAdapters) and len(module.adapter_names) > 1:
        raise ValueError(
            f"the module has {len(module.adapter_names)} adapters, of which {algorithm} would train one: set "
            "model.num_adapters=1, or take an algorithm that shares the clients out among adapters, such as FedBiscuit"
        )
