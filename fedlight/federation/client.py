"""The records of a round: who takes part, what is done there, what comes back; and what a datamodule must tell."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from fedlight.federation.state import State


@dataclass
class Client:
    """One member of the federation.

    Attributes:
        id: its name in the data, such as a worker id.
        num_examples: training examples that it holds, at least 1.
        share: ``num_examples`` over the examples of all clients, the papers' ``p_m``, in (0, 1].
        memory: what an algorithm keeps with the client between rounds, there during its visits; tensors and plain
            values only.
    """

    id: str
    num_examples: int
    share: float
    memory: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Visit:
    """One run of local training batches at one client; ``split`` names which of its data are used."""

    client_id: str
    num_batches: int
    split: str = "train"


@dataclass(frozen=True)
class Work:
    """What was done in a visit.

    Attributes:
        num_steps: optimizer steps, of all optimizers.
        lr: the learning rate of the last step, of the first optimizer's first group; 0 where it has none.
        mean_loss: over the batches; None where the module returned none.
        seconds: of wall time.
        lr_sums: by name of each trained parameter, the sum of the learning rates of the steps that its optimizer took.
    """

    num_steps: int
    lr: float
    mean_loss: float | None
    seconds: float
    lr_sums: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Update:
    """What a visit contributes: the movement of what the client trained (fp64) and its weight in the average."""

    client_id: str
    movement: State
    weight: float


@dataclass(frozen=True)
class Upload:
    """What reached the server of one client, as an attacker at the server sees it.

    Attributes:
        round_idx: the round in which it came.
        client_id: who sent it.
        state: the parameters that the client sent: those that it received, moved by what arrived of its movement (fp32).
    """

    round_idx: int
    client_id: str
    state: State


class NumBatches(Protocol):
    """How many batches a visit has; what an algorithm plans with."""

    def __call__(self, client_id: str, split: str = "train") -> int:
        """Of a visit to the client that trains on these of its data."""


@runtime_checkable
class FederatedData(Protocol):
    """What the federated loop needs of a datamodule: whose example is whose, and batches visit after visit."""

    def client_sizes(self) -> dict[str, int]:
        """Training examples of each client, after ``setup("fit")``."""

    def num_batches(self, client_id: str, split: str = "train") -> int:
        """Batches in one pass over these of the client's data."""

    def set_visits(self, visits: Sequence[Visit], round_idx: int) -> None:
        """Makes the next training loader stream these visits in this order."""


def build_clients(sizes: dict[str, int]) -> dict[str, Client]:
    """The clients in the order of their ids, whatever the order of the data.

    Raises:
        ValueError: there is no client, or one without training examples.

    Example:
        >>> [(c.id, c.share) for c in build_clients({"b": 1, "a": 3}).values()]
        [('a', 0.75), ('b', 0.25)]
    """
    if not sizes:
        raise ValueError(
            "the training data have no clients: have the function of ByClient, or client_sizes() of the data, name some"
        )
    empty = [client_id for client_id, size in sizes.items() if size < 1]
    if empty:
        raise ValueError(
            f"{len(empty)} clients have no training examples, the first is {empty[0]!r}: "
            "leave them out of the partition or ask it for a minimum size"
        )
    total = sum(sizes.values())
    return {name: Client(name, sizes[name], sizes[name] / total) for name in sorted(sizes)}
