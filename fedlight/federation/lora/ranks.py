"""LoRA ranks of clients: each client's rank, and the part of a state for a smaller rank.

The module has adapters of the largest rank R. A client of rank r is sent the first r rows of each A and the first r columns
of each B. It trains them in the module of rank R, whose other rows and columns are 0: a zero row of A together with a zero
column of B has a gradient of exactly 0, so an optimizer that steps each number by itself leaves both there, and the client
trains as with a module of rank r. The scaling alpha / R is the same for all ranks, as slices could not be compared
otherwise.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from fedlight.federation.channel import LOST
from fedlight.federation.client import Client, State, Visiting
from fedlight.federation.lora.pairs import LoraPair, factor_of, find_pairs, pad_to, slice_to_rank

LoraRanks = dict[str, int] | list[int]
"""Client or device -> its rank; or ranks of which each client has the largest that fits its device."""
PRUNED = "lora_rank"
"""Key in a client's memory of the rank to which it has pruned its adapter; absent for a client that has not."""


def largest_rank(parameters: Mapping[str, Tensor], ranks: LoraRanks | None = None) -> int:
    """Return the rank R of the adapters among the parameters, of layers of unlike ranks the largest.

    Raises:
        ValueError: there is no LoRA adapter, or one that is no plain pair of factors; one of ``ranks`` is above R.
    """
    pairs = _pairs_of(parameters)
    if not pairs:
        raise ValueError(
            "clients of unlike ranks train LoRA adapters, and no trained parameter is the A or B of one: train one, such as "
            "model.lora.rank=8, or take another algorithm"
        )
    largest = max(pair.rank(parameters) for pair in pairs)
    numbers = [] if ranks is None else [*ranks.values()] if isinstance(ranks, dict) else ranks
    above = [rank for rank in numbers if rank > largest]
    if above:
        raise ValueError(
            f"ranks={ranks!r}: {above[0]} is above the rank {largest} of the module's adapters, of which "
            f"clients train a part: set model.lora.rank to {max(above)} or more, or lower it"
        )
    return largest


def ranks_by_hand(
    ranks: Mapping[str, int], devices: Mapping[str, str], known: Sequence[str], otherwise: int
) -> dict[str, int]:
    """Return client id -> rank from ranks by client or device; a client's own comes before that of its device.

    Args:
        ranks: client id or device name -> rank.
        devices: client id -> name of its device, empty without one.
        known: names of all devices, also of those that no client has.
        otherwise: rank of clients that are named in neither way.

    Raises:
        ValueError: a name is of no client and no device, or of both.

    Examples:
        >>> ranks_by_hand({"phone": 2, "b": 4}, {"a": "phone", "b": "phone", "c": "board"}, ["phone", "board"], 8)
        {'a': 2, 'b': 4, 'c': 8}
    """
    for name in ranks:
        if name not in devices and name not in known:
            raise ValueError(
                f"ranks.{name}: there is no such client or device; clients are {_some(devices)}"
                + (f", devices {_some(known)}" if known else "")
            )
        if name in devices and name in known:
            raise ValueError(
                f"ranks.{name}: there is a client and a device of this name, and which of them has the rank "
                "cannot be told: rename the device, in the file of its profile, or the client, in the data"
            )
    return {client: ranks.get(client, ranks.get(device, otherwise)) for client, device in devices.items()}


def _some(names: Mapping[str, str] | Sequence[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:5]) + (f" and {len(shown) - 5} more" if len(shown) > 5 else "")


def rank_of(client: Client) -> int | None:
    """Return the rank that a client trains: its own, or the one left after pruning; None for the module's.

    Examples:
        >>> rank_of(Client("a", 1, 1.0)), rank_of(Client("a", 1, 1.0, {PRUNED: 2}, lora_rank=4))
        (None, 2)
    """
    known = [rank for rank in (client.lora_rank, client.memory.get(PRUNED)) if rank is not None]
    return min(known, default=None)


def prune(client: Client, rank: int) -> None:
    """Note that a client goes on with a smaller rank; the loss that its channel keeps is cut as well."""
    client.memory[PRUNED] = rank
    if LOST in client.memory:
        client.memory[LOST] = cut_to_rank(client.memory[LOST], rank)


def cut_to_rank(state: State, rank: int | None) -> State:
    """Return the part of a state for a client of that rank; the state itself for None or no larger rank. Shapes will do.

    Raises:
        ValueError: a LoRA tensor is in no pair of factors.
    """
    if rank is None:
        return state
    larger = [pair for pair in _pairs_of(state) if pair.rank(state) > rank]
    return slice_to_rank(state, larger, rank) if larger else state


def pad_like(state: State, like: Mapping[str, Tensor], rank: int | None) -> State:
    """Return a state that was cut to ``rank`` with zeros up to the ranks of ``like``; for None the state itself."""
    if rank is None:
        return state
    factors = [name for pair in _pairs_of(state) for name in (pair.a, pair.b)]
    return state | {name: pad_to(state[name], like[name].shape) for name in factors}


def cut_module(module: nn.Module, rank: int) -> None:
    """Replace the LoRA parameters of a module by those of a client of that rank, such as meta tensors of its shapes."""
    parameters: State = dict(module.named_parameters())
    small = cut_to_rank(parameters, rank)
    for pair in _pairs_of(parameters):
        for name in (pair.a, pair.b):
            path, _, key = name.rpartition(".")
            owner, learns = module.get_submodule(path), parameters[name].requires_grad
            owner._parameters[key] = nn.Parameter(small[name].detach(), learns)


def trained_ranks(visiting: Visiting) -> Mapping[str, int]:
    """Return how many rows of A, or columns of B, a visit trains of each LoRA factor that it does not train whole."""
    # Zero gradients keep the others at 0; a forward-only visit has none, and asks here.
    if visiting.lora_rank is None:
        return visiting.ranks
    return {name: visiting.lora_rank for pair in _pairs_of(visiting.start) for name in (pair.a, pair.b)}


def trained_part(name: str, factor: Tensor, ranks: Mapping[str, int]) -> Tensor:
    """Return the rows of A or columns of B that a visit trains, in the memory of ``factor``; other tensors as they are.

    Args:
        name: name of the tensor.
        factor: tensor of the shape that the module's parameter has.
        ranks: see `trained_ranks`.

    Examples:
        >>> import torch
        >>> ranks = {"q.lora_A.weight": 1, "q.lora_B.weight": 1}
        >>> [tuple(trained_part(f"q.lora_{one}.weight", torch.ones(2, 2), ranks).shape) for one in "AB"]
        [(1, 2), (2, 1)]
    """
    if name not in ranks:
        return factor
    return factor[: ranks[name]] if factor_of(name) == "A" else factor[:, : ranks[name]]


def refuse_moved_zeros(state: State, rank: int | None) -> None:
    """Raise ValueError for trained factors whose rows or columns beyond a client's rank are no longer 0."""
    for pair in [] if rank is None else _pairs_of(state):
        if state[pair.a][rank:].any() or state[pair.b][:, rank:].any():
            raise ValueError(
                f"{pair.layer} was trained beyond the client's rank {rank}, where gradients are 0: the optimizer or a "
                "callback moves parameters without a gradient. Take an optimizer that steps each number by itself, such as "
                "AdamW or SGD, or leave the algorithm's ranks out"
            )


def _pairs_of(state: Mapping[str, Tensor]) -> list[LoraPair]:
    pairs, others = find_pairs(state)
    if others:
        name, reason = next(iter(others.items()))
        raise ValueError(
            f"{name} cannot be cut to a client's rank ({reason}): train plain LoRA adapters, both A and B, or take an "
            "algorithm whose clients have one rank, such as FedAvg"
        )
    return pairs
