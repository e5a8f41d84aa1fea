"""Training and validation sets of clients, and counts of their examples by label.

Each client's examples are split into training and validation by key (the compared pair, the prompt), so that no client is
scored on examples that it trains on. FedBiscuit (F. Wu et al., ICLR 2025, https://arxiv.org/abs/2407.03038, section 5.1)
groups clients by their validation sets and gives no size for them. Its Figure 3, and Figure 4 of FedDCA (Wang et al., 2024,
https://arxiv.org/abs/2409.20135), show the counts of their data.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedlight.datamodules.clients.partition import Clients, Partition
from fedlight.support.seeding import derive_seed


@dataclass(frozen=True)
class ClientSplit:
    """Training and validation examples of each client, with counts."""

    train: Clients  # training examples of each client
    val: Clients | None  # validation examples of each client; None without validation
    dropped_clients: int  # number of clients left out with fewer examples than ``min_size``
    single_category_clients: int | None  # number of clients with one category; None without categories


def share_out(
    partition: Partition | None,
    owners: Sequence[str],
    categories: Sequence[str],
    prompts: np.ndarray,
    keys: np.ndarray,
    share: float,
    at_most: int,
    seed: int,
) -> ClientSplit:
    """Partition examples and split off the validation examples of each client; see `Partition.split` and `hold_out`.

    ``owners`` and ``categories`` are empty where the data have none; with ``share`` 0 there is no validation. Without a
    partition each owner is a client, and without owners there is a single one.
    """
    partition = partition or (Partition() if owners else Partition("iid", num_clients=1))
    clients = partition.split(owners, categories, prompts, seed)
    train, val = hold_out(clients, keys, share, at_most, seed) if share else (clients, None)
    dropped = len(set(owners)) - len(clients) if partition.by == "client" else 0
    labels = [{categories[index] for index in indices} for indices in clients.values() if categories]
    return ClientSplit(train, val, dropped, [*map(len, labels)].count(1) if categories else None)


def hold_out(
    clients: Clients, keys: Sequence[int] | np.ndarray, share: float, at_most: int, seed: int
) -> tuple[Clients, Clients]:
    """Split every client's examples into training and validation, with no key (the compared pair) on both sides.

    ``max(1, floor(share * keys))`` keys, at most ``at_most``, go to validation where the client has two keys or more. A
    client with one key trains on it and is scored on it. The draw depends on seed and client id.

    Examples:
        >>> train, val = hold_out({"u": np.arange(40), "v": np.array([40])}, np.arange(41), 0.05, 200, seed=0)
        >>> len(train["u"]), len(val["u"]), train["v"].tolist(), val["v"].tolist()
        (38, 2, [40], [40])
    """
    keys = np.asarray(keys)
    train, val = {}, {}
    for client, indices in clients.items():
        client_keys = np.unique(keys[indices])
        if len(client_keys) == 1:  # one key cannot be on two sides
            train[client] = val[client] = indices
            continue
        wanted = min(max(1, int(share * len(client_keys) + 1e-9)), at_most)  # 0.29 * 100 is 28.999...
        rng = np.random.default_rng(derive_seed(seed, "validation", client))  # independent of other clients
        chosen = rng.permutation(client_keys)[:wanted]
        held = np.isin(keys[indices], chosen)  # [examples of the client]
        train[client], val[client] = indices[~held], indices[held]
    return train, val


def pool(clients: Clients, lengths: np.ndarray | None = None) -> tuple[np.ndarray, Clients]:
    """Return the indices that make up one pooled set, in its order, and each client's positions in it.

    With ``lengths`` of the examples of the larger set, the pooled set is sorted by length, so that batches cut from it in
    order are padded little; else clients follow each other.

    Examples:
        >>> order, positions = pool({"u": np.array([0, 2]), "v": np.array([1])}, lengths=np.array([3, 2, 1]))
        >>> order.tolist(), {client: places.tolist() for client, places in positions.items()}
        ([2, 1, 0], {'u': [0, 2], 'v': [1]})
    """
    order = np.concatenate(list(clients.values()))  # [examples]
    owner = np.repeat(np.arange(len(clients)), [len(indices) for indices in clients.values()])  # [examples]
    if lengths is not None:
        by_length = np.argsort(lengths[order], kind="stable")
        order, owner = order[by_length], owner[by_length]
    counts = np.bincount(owner, minlength=len(clients))  # a client may have no examples
    positions = np.split(np.argsort(owner, kind="stable"), np.cumsum(counts)[:-1])  # ascending per client
    return order, dict(zip(clients, positions, strict=True))


def reindex(clients: Clients, order: np.ndarray) -> Clients:
    """Return the positions of each client's examples in a set reordered by ``order``, indices into the set before.

    Examples:
        >>> after = reindex({"u": np.array([0, 2]), "v": np.array([1])}, order=np.array([2, 1, 0]))
        >>> {client: places.tolist() for client, places in after.items()}
        {'u': [0, 2], 'v': [1]}
    """
    place = np.argsort(order)  # the argsort of a permutation is its inverse
    return {client: np.sort(place[indices]) for client, indices in clients.items()}


class ClientCount(NamedTuple):
    """Number of examples (``rows``) of one label that one client has in ``train`` or ``val``.

    ``label`` is empty where the data have no categories. A vote that a selector sees in both orders is two examples.
    """

    client: str
    label: str
    split: str
    rows: int


def count_labels(
    split: str, clients: Mapping[str, np.ndarray], labels: Sequence[str] | None
) -> list[ClientCount]:
    """Count the examples of one set by client, in their order, and by label, in alphabetical order.

    ``split`` is ``train`` or ``val``; ``labels`` has the category of every example, or is None where the data have none.

    Examples:
        >>> clients = {"u": np.array([0, 2, 3]), "v": np.array([1])}
        >>> [tuple(count) for count in count_labels("train", clients, ["tea", "rice", "jam", "tea"])]
        [('u', 'jam', 'train', 1), ('u', 'tea', 'train', 2), ('v', 'rice', 'train', 1)]
    """
    counted: list[ClientCount] = []
    for client, places in clients.items():
        counts = Counter({"": len(places)}) if labels is None else Counter(labels[index] for index in places)
        counted += [ClientCount(client, label, split, rows) for label, rows in sorted(counts.items())]
    return counted


def label_examples(categories: Sequence[str], order: np.ndarray, each: int = 1) -> list[str] | None:
    """Return the label of each example of a set; None where the rows have no categories.

    ``order`` has the indices of the examples; one beyond the rows was added and is labelled ``added``. ``each`` neighbouring
    examples are made from one row.

    Examples:
        >>> label_examples(["tea", "jam"], np.array([1, 2, 0])), label_examples(["tea", "jam"], np.array([3, 0]), each=2)
        (['jam', 'added', 'tea'], ['jam', 'tea'])
    """
    if not categories:
        return None
    rows = order // each  # both orders of a vote come from one row
    return [categories[row] if row < len(categories) else "added" for row in rows]
