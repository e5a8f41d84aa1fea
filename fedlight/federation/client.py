"""What a server and its clients exchange: states, clients, visits and their updates, and the channel between them."""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Size, Tensor, aminmax, float32, float64, no_grad

from fedlight.support.checks import Checked
from fedlight.support.seeding import derive_seed

State = dict[str, Tensor]
"""Parameter name -> CPU tensor; a name that is absent was not sent."""


def read(parameters: Mapping[str, Tensor]) -> State:
    """Return a detached fp32 copy on the CPU, which later training cannot change."""
    return {name: p.detach().to("cpu", float32, copy=True) for name, p in parameters.items()}


@no_grad()
def write(state: State, parameters: Mapping[str, Tensor]) -> None:
    """Copy ``state`` into ``parameters`` in place, cast to their type and device; other parameters stay."""
    for name, value in state.items():
        parameters[name].copy_(value)


def movement(received: State, trained: State) -> State:
    """Return the movement of each trained tensor, ``trained - received``, in fp64; from 0 where none was received."""
    # In fp64 the difference of two fp32 numbers is exact where neither is below 2^-29 of the other. NumPy converts as it
    # goes; torch would first make a whole copy of each in fp64, in twice the time.
    starts = {name: _array(received[name]) if name in received else 0 for name in trained}
    differences = {
        name: np.subtract(_array(value), starts[name], dtype=np.float64) for name, value in trained.items()
    }
    return {name: torch.as_tensor(value) for name, value in differences.items()}  # also of a single number


def _array(value: Tensor) -> np.ndarray:
    """Return the numbers for NumPy, which has no bf16, without a copy of other types."""
    array: np.ndarray = (value.float() if value.dtype == torch.bfloat16 else value).detach().numpy()
    return array


def moved(state: State, by: State, scale: float = 1.0) -> State:
    """Return ``state + scale * by``, taken in fp64 and rounded to fp32 once; names absent from ``by`` stay as they are."""
    return {
        name: value.to(float64).add_(by[name], alpha=scale).to(float32) if name in by else value
        for name, value in state.items()
    }


DIVERGED = "diverged"
"""Reason why a client whose training diverged did not take part, beside those of the virtual clock."""


class Diverged(ValueError):
    """Training of a client that gave NaN or infinity; its work of the round is left out."""


def refuse_not_finite(state: Mapping[str, Tensor], what: str) -> None:
    """Raise `Diverged` for a tensor with NaN or infinity; ``what`` names the state in the error.

    Examples:
        >>> import torch
        >>> refuse_not_finite({"w": torch.tensor([1.0, float("nan")])}, "the trained")
        Traceback (most recent call last):
        fedlight.federation.client.Diverged: the trained w is not finite
    """
    # A sum with a term that is not finite is not finite; where a sum of finite numbers overflows, each tensor is looked at.
    if all(value.dtype in (float32, float64) for value in state.values()) and math.isfinite(
        sum(value.sum().item() for value in state.values())
    ):
        return
    for name, value in state.items():
        if not is_finite(value):
            raise Diverged(f"{what} {name} is not finite")


def is_finite(value: Tensor) -> bool:
    """Return whether a tensor has neither NaN nor infinity.

    Examples:
        >>> import torch
        >>> is_finite(torch.tensor([1.0, -2.0])), is_finite(torch.tensor([1.0, float("nan"), 2.0]))
        (True, False)
    """
    if value.dtype not in (float32, float64) or not value.numel():
        return bool(value.isfinite().all())
    least, most = aminmax(value)  # both NaN where there is one; a tenth of the time of isfinite()
    return math.isfinite(least.item()) and math.isfinite(most.item())


T = TypeVar("T")


@dataclass
class Client:
    """Client of the federation.

    Attributes:
        id: its name in the data, such as a worker id.
        num_examples: training examples that it holds, at least 1.
        share: ``num_examples`` over the examples of all clients, the papers' ``p_m``, in (0, 1].
        memory: state kept with the client between rounds, filled during its visits; tensors and plain values only. Under
            ``OWN_STATE`` an algorithm keeps the parameters that the client would go on with alone.
        lora_rank: rank of its LoRA adapters, at most that of the module; None for that of the module. The loop sets it.
    """

    id: str
    num_examples: int
    share: float
    memory: dict[str, Any] = field(default_factory=dict)
    lora_rank: int | None = None


OWN_STATE = "own_state"
"""Key in a client's memory of the parameters with which it would go on alone; absent where these are the global ones."""


@dataclass(frozen=True)
class Visit:
    """Run of local training batches at one client, on its data of one ``split``.

    Attributes:
        client_id: the client.
        num_batches: number of batches, at least 1.
        split: data that it trains on; visits of one round on the same split have the same batches.
        part: name of the client's task in it, where an algorithm gives it several visits on one split in a round.
        asked: round that asked the client and sent it the model, and whose batches it trains on; None for the round that
            trains it, as in every synchronous round.
        whole_passes: whether the batches are passes over all examples, whose last batch may be short; else every batch is
            full, and a pass leaves its remainder out.
    """

    client_id: str
    num_batches: int
    split: str = "train"
    part: str = ""
    asked: int | None = None
    whole_passes: bool = False

    @property
    def label(self) -> str:
        """Name of the visit among those of its client in the round: its part, or else its split."""
        return self.part or self.split

    @property
    def purpose(self) -> tuple[str, ...]:
        """Client, split and, where there is one, part: seeds of the visit's draws."""
        return (self.client_id, self.split, *([self.part] if self.part else []))

    def asked_in(self, round_idx: int) -> int:
        """Return the round that asked the client, given the one that trains the visit."""
        return round_idx if self.asked is None else self.asked


@dataclass(frozen=True)
class SharedDirections:
    """Directions that all clients and the server know by their numbers, for forward-only visits.

    Attributes:
        number: how many there are, at least 1.
        seed: seed of all of them.
    """

    number: int
    seed: int

    def key(self, index: int) -> tuple[int | str, ...]:
        """Return the key of a direction, for `fedlight.federation.forward.zeroth_order.direction`."""
        return (self.seed, "shared direction", index)


Group = tuple[Visit, ...]
"""Visits of different clients with equally many batches, which are trained side by side; at least one."""


@dataclass
class Visiting:
    """Visit under way: made by ``Algorithm.start_visit``, given to every later hook, forgotten after ``finish_visit``.

    Several exist at once where clients train side by side, so an algorithm keeps here, and not in its attributes, whatever
    it needs of one visit.

    Attributes:
        visit: the visit.
        client: its client, with its memory.
        received: tensors that the client has received in this round (fp32), with zeros beyond its LoRA rank.
        start: the parameters that it starts from (fp32); their names are those that it trains.
        notes: values that the algorithm needs during the visit, such as a correction of gradients.
        adapter: of the module's adapters the one that computes and learns; None for the one in use.
        directions: those that a forward-only visit draws from; None for its own.
        before: the client's visit before this one in the same round; None in its first. The loop sets it.
        shapes_only: whether the loop asks for names and shapes alone, before the round: tensors are then on the meta
            device, and a hook does nothing beside its reply. The loop sets it.
        lora_rank: LoRA rank of the client in this visit; None for that of the module. The loop sets it.
        ranks: name of a LoRA factor -> how many rows of A, or columns of B, it trains, from the first on, where these are
            not all and an algorithm, not ``lora_rank``, says so; the others are 0.
    """

    visit: Visit
    client: Client
    received: State
    start: State
    notes: dict[str, Any] = field(default_factory=dict)
    adapter: str | None = None
    directions: SharedDirections | None = None
    before: "Visiting | None" = None
    shapes_only: bool = False
    lora_rank: int | None = None
    ranks: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Work:
    """Local training of one visit.

    Attributes:
        num_steps: optimizer steps, of all optimizers.
        lr: learning rate of the last step, of the first optimizer's first group; 0 where it has none.
        mean_loss: mean loss over the batches; None where the module returned none.
        seconds: wall time.
        lr_sums: name of each trained parameter -> sum of the learning rates of its optimizer's steps.
        first_loss: loss of the first batch, at the client's start parameters; None where the module returned none.
        gone: of a forward-only visit, for each of its perturbations the index of the direction among the visit's shared ones
            (0 without), and how far the parameters went against it.
    """

    num_steps: int
    lr: float
    mean_loss: float | None
    seconds: float
    lr_sums: Mapping[str, float] = field(default_factory=dict)
    first_loss: float | None = None
    gone: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True)
class Update:
    """Contribution of a visit.

    Attributes:
        client_id: the client.
        movement: movement of the trained tensors (fp64).
        weight: its weight in the average.
        received: tensors that the client has received in the round (fp32), where the movement starts. The loop sets it.
        keeps_factors: whether the client keeps a LoRA factor that the server does not know. The loop sets it.
    """

    client_id: str
    movement: State
    weight: float
    received: State = field(default_factory=dict)
    keeps_factors: bool = False


@dataclass(frozen=True)
class Upload:
    """Upload of one client, as an attacker at the server sees it.

    Attributes:
        round_idx: the round of the upload.
        client_id: the client that sent it.
        state: parameters that the client received, plus its movement as it arrived (fp32).
    """

    round_idx: int
    client_id: str
    state: State


def build_clients(sizes: dict[str, int]) -> dict[str, Client]:
    """Return the clients in the order of their ids, whatever the order of the data.

    Raises:
        ValueError: there is no client, one without training examples, or an id with a lone surrogate.
    """
    if not sizes:
        raise ValueError(
            "the training data have no clients: have the function of ByClient, or client_sizes() of the data, name some"
        )
    cut = next((name for name in sizes if any("\ud800" <= letter <= "\udfff" for letter in name)), None)
    if cut is not None:
        raise ValueError(f"the client {cut!r} has half of a character, which no file can hold: rename it")
    empty = [client_id for client_id, size in sizes.items() if size < 1]
    if empty:
        raise ValueError(
            f"{len(empty)} clients have no training examples, the first is {empty[0]!r}: "
            "leave them out of the partition or ask it for a minimum size"
        )
    total = sum(sizes.values())
    return {name: Client(name, sizes[name], sizes[name] / total) for name in sorted(sizes)}


def uniform_cohort(clients: Sequence[T], number: int, seed: int, round_idx: int, draw: int = 0) -> list[T]:
    """Return ``number`` clients in their order, drawn uniformly without replacement by seed, round and draw in the round.

    Examples:
        >>> uniform_cohort("abcd", 2, seed=0, round_idx=0)
        ['c', 'd']
    """
    further = [draw] if draw else []  # draw 0 is that of a synchronous round
    generator = np.random.default_rng(derive_seed(seed, "cohort", round_idx, *further))
    chosen = generator.choice(len(clients), size=number, replace=False)
    return [clients[i] for i in sorted(chosen.tolist())]


def cohort_in_turn(clients: Sequence[T], number: int, seed: int, round_idx: int) -> list[T]:
    """Return the ``number`` clients, in their order, whose turn it is: each comes again once all others have come.

    The order of turns follows from the seed. A client's rounds are at least ``len(clients) // number`` apart.

    Examples:
        >>> ["".join(cohort_in_turn("abcde", 2, seed=0, round_idx=round_idx)) for round_idx in range(5)]
        ['de', 'ac', 'bd', 'ae', 'bc']
    """
    turns = np.random.default_rng(derive_seed(seed, "turns")).permutation(len(clients))
    places = np.arange(round_idx * number, (round_idx + 1) * number) % len(clients)
    return [clients[i] for i in sorted(turns[places].tolist())]


@dataclass(frozen=True)
class Payload:
    """State that arrives at the other end, and the bytes that were sent."""

    state: State
    num_bytes: int


class Channel(Checked, ABC):
    """Way from the server to a client and back; the number of bytes is known before anything is sent.

    Attributes:
        error_feedback: whether the loss of a client's message is added to its next one.
    """

    error_feedback: bool = False

    def down(self, state: State, client: Client) -> Payload:
        """Return the server's state as the client receives it (fp32)."""
        message = self.message_down(state)
        return Payload(self.read_down(message, _shapes(state)), serialized_bytes(message))

    def up(
        self, received: State, trained: State, client: Client, without_feedback: Collection[str] = ()
    ) -> Payload:
        """Return the client's movement (fp64) as it reaches the server.

        Args:
            received: tensors that the client received.
            trained: tensors that it sends back; one that it did not receive moved from 0.
            client: with its memory, where a channel may keep the loss of a message.
            without_feedback: names whose loss is not kept: tensors of an algorithm's own beside the parameters, such as
                control variates. Each message has them as a whole, so the next makes up for what this one loses.
        """
        message = self.message_up(received, trained, client, without_feedback)
        return Payload(self.read_up(message, received, _shapes(trained)), serialized_bytes(message))

    def message_down(self, state: State) -> State:
        """Return the tensors that `down` sends, laid out as in a safetensors file, for a server in another process."""
        raise _no_messages(self)

    def read_down(self, message: State, shapes: Mapping[str, Size]) -> State:
        """Return the state of `down`'s payload, with these shapes by name, given what `message_down` returned."""
        raise _no_messages(self)

    def message_up(
        self, received: State, trained: State, client: Client, without_feedback: Collection[str] = ()
    ) -> State:
        """Return the tensors that `up` sends, and keep with the client what `up` would, for a client in another process."""
        raise _no_messages(self)

    def read_up(self, message: State, received: State, shapes: Mapping[str, Size]) -> State:
        """Return the state of `up`'s payload (fp64), with these shapes by name, given what `message_up` returned."""
        raise _no_messages(self)

    @abstractmethod
    def down_bytes(self, state: State) -> int:
        """Return ``num_bytes`` of the payload of ``down`` for tensors of these names and shapes, whatever their values."""

    @abstractmethod
    def up_bytes(self, state: State) -> int:
        """Return ``num_bytes`` of the payload of ``up`` for tensors of these names and shapes, whatever their values."""


def _shapes(state: State) -> dict[str, Size]:
    return {name: value.shape for name, value in state.items()}


def _no_messages(channel: Channel) -> ValueError:
    return ValueError(
        f"channel={type(channel).__name__} cannot send between processes: give it message_down, read_down, "
        "message_up and read_up, or take Wire"
    )


TYPES = {
    **{torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.float8_e5m2: "F8_E5M2"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.int16: "I16", torch.uint16: "U16", torch.float16: "F16"},
    **{torch.bfloat16: "BF16", torch.int32: "I32", torch.uint32: "U32", float32: "F32"},
    **{float64: "F64", torch.int64: "I64", torch.uint64: "U64"},
}
"""Number types and their names in safetensors files; tensors of a later one stand before those of an earlier one."""


@lru_cache(maxsize=64)
def _safetensors_size(layout: tuple[tuple[str, torch.dtype, torch.Size], ...]) -> int:
    """Return the bytes of a safetensors file by its header, without making it."""
    entries, stop = {}, 0
    for name, dtype, shape in sorted(layout, key=lambda each: (-[*TYPES].index(each[1]), each[0])):
        start, stop = stop, stop + shape.numel() * dtype.itemsize
        entries[name] = {"dtype": TYPES[dtype], "shape": [*shape], "data_offsets": [start, stop]}
    header = len(json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode())
    return 8 + -(-header // 8) * 8 + stop


def serialized_bytes(state: State) -> int:
    """Return the length of ``state`` as a safetensors file in bytes, 0 if it is empty; measured once per layout."""
    if not state:
        return 0
    return _safetensors_size(tuple((name, value.dtype, value.shape) for name, value in state.items()))


class Identity(Channel):
    """Lossless fp32 channel: parameters go down, trained parameters come up."""

    def message_down(self, state: State) -> State:
        return state

    def read_down(self, message: State, shapes: Mapping[str, Size]) -> State:
        return message

    def message_up(
        self, received: State, trained: State, client: Client, without_feedback: Collection[str] = ()
    ) -> State:
        return trained

    def read_up(self, message: State, received: State, shapes: Mapping[str, Size]) -> State:
        # The server knows the sent parameters, so it takes the difference itself, in fp64 and without a loss.
        return movement(received, message)

    def down_bytes(self, state: State) -> int:
        return serialized_bytes(state)

    def up_bytes(self, state: State) -> int:
        return serialized_bytes(state)
