"""From a partition to training and validation sets: who trains on what, who is scored on what, in which order.

Each client's examples are split into training and validation by key (the compared pair, the prompt), so that
nothing a client trains on is what it is scored on. Share 0.05 and at most 200 are those of FedBiscuit (Wu et
al., ICLR 2025, https://arxiv.org/abs/2407.03038).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedlight.datamodules.clients.partition import Clients, Partition
from fedlight.support.seeding import derive_seed


@dataclass(frozen=True)
class Split:
    """Examples by client, and what had to be left out on the way there.

    Attributes:
        train: what each client trains on.
        val: what each client is scored on; None without validation.
        dropped_clients: clients with fewer examples than ``min_size``.
        single_category_clients: clients all of whose examples have one category; None without categories.
    """

    train: Clients
    val: Clients | None
    dropped_clients: int
    single_category_clients: int | None


def share_out(
    partition: Partition,
    owners: Sequence[str],
    categories: Sequence[str],
    prompts: np.ndarray,
    keys: np.ndarray,
    share: float,
    at_most: int,
    seed: int,
) -> Split:
    """Partitions examples and splits off the validation examples of each client.

    Args:
        partition: how.
        owners: per example the client it comes from; empty where the data do not say.
        categories: per example its category; empty where the data do not say.
        prompts: per example the number of its prompt.
        keys: per example what must not be on both sides of the validation split.
        share: of the validation, in [0, 1); 0: none.
        at_most: most keys of a client in validation.
        seed: of every draw.
    """
    clients = partition.split(owners, categories, prompts, seed)
    train, val = hold_out(clients, keys, share, at_most, seed) if share else (clients, None)
    dropped = len(set(owners)) - len(clients) if partition.by == "client" else 0
    return Split(train, val, dropped, count_single(np.array(categories), clients))


def check_validation(val_share: float, val_max: int, least: int = 1) -> None:
    """Refuses settings of the validation split that are out of range.

    Args:
        val_share: see `hold_out`.
        val_max: likewise.
        least: smallest ``val_max``.

    Raises:
        ValueError: one is.

    Example:
        >>> check_validation(0.05, 200)
        >>> check_validation(1.0, 200)
        Traceback (most recent call last):
        ...
        ValueError: val_share=1.0 must lie in [0, 1) and val_max=200 must be at least 1
    """
    if not 0 <= val_share < 1 or val_max < least:
        raise ValueError(
            f"val_share={val_share} must lie in [0, 1) and val_max={val_max} must be at least {least}"
        )


def hold_out(
    clients: Clients, keys: Sequence[int] | np.ndarray, share: float, at_most: int, seed: int
) -> tuple[Clients, Clients]:
    """Splits every client's examples into training and validation, by key, so that no key is on both sides.

    ``max(1, floor(share * keys))`` keys, at most ``at_most``, go to validation where the client has two keys or more. A
    client with one key trains on it and is scored on it.

    Args:
        clients: the examples of each client.
        keys: the key (the compared pair) of every example; votes on one pair stay together.
        share: share for validation, in [0, 1).
        at_most: most keys of one client in validation, >= 1.
        seed: together with the client's id it decides which.

    Example:
        >>> train, val = hold_out({"u": np.arange(40), "v": np.array([40])}, np.arange(41), 0.05, 200, seed=0)
        >>> len(train["u"]), len(val["u"]), train["v"].tolist(), val["v"].tolist()
        (38, 2, [40], [40])
    """
    keys = np.asarray(keys)
    train, val = {}, {}
    for client, indices in clients.items():
        own = np.unique(keys[indices])
        if len(own) == 1:
            train[client] = val[client] = indices
            continue
        wanted = min(max(1, int(share * len(own))), at_most)
        rng = np.random.default_rng(derive_seed(seed, "validation", client))
        chosen = rng.permutation(own)[:wanted]
        held = np.isin(keys[indices], chosen)
        train[client], val[client] = indices[~held], indices[held]
    return train, val


def pool(clients: Clients, lengths: np.ndarray | None = None) -> tuple[np.ndarray, Clients]:
    """Puts the clients' examples into one set.

    Args:
        clients: the examples of each client, as indices into a larger set.
        lengths: sorts the set by these, so that batches cut from it in order are padded little, ``(larger set,)``.

    Returns:
        The indices that make up the set, in its order, and each client's positions in it.

    Example:
        >>> order, positions = pool({"u": np.array([0, 2]), "v": np.array([1])}, lengths=np.array([3, 2, 1]))
        >>> order.tolist(), {client: own.tolist() for client, own in positions.items()}
        ([2, 1, 0], {'u': [0, 2], 'v': [1]})
    """
    order = np.concatenate(list(clients.values()))
    owner = np.repeat(np.arange(len(clients)), [len(indices) for indices in clients.values()])
    if lengths is not None:
        by_length = np.argsort(lengths[order], kind="stable")
        order, owner = order[by_length], owner[by_length]
    counts = np.bincount(owner, minlength=len(clients))
    positions = np.split(np.argsort(owner, kind="stable"), np.cumsum(counts)[:-1])
    return order, dict(zip(clients, positions, strict=True))


def positions(clients: Clients, order: np.ndarray) -> Clients:
    """Where each client's examples are in a set that has been put in another order.

    Args:
        clients: the examples of each client, as indices into the set before.
        order: the set after, as indices into the set before, ``(examples,)``.

    Example:
        >>> after = positions({"u": np.array([0, 2]), "v": np.array([1])}, order=np.array([2, 1, 0]))
        >>> {client: own.tolist() for client, own in after.items()}
        {'u': [0, 2], 'v': [1]}
    """
    place = np.argsort(order)
    return {client: np.sort(place[own]) for client, own in clients.items()}


def count_single(categories: np.ndarray, clients: Clients) -> int | None:
    """Clients whose examples all have one category; None where there are no categories.

    Example:
        >>> count_single(np.array(["x", "x", "y"]), {"u": np.array([0, 1]), "v": np.array([1, 2])})
        1
    """
    if not len(categories):
        return None
    return sum(len(set(categories[indices])) == 1 for indices in clients.values())
