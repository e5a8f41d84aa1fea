"""Partitions of examples over clients: iid, Dirichlet over a category, or by key; functions of data and seed.

Every function returns ``{client id: sorted int64 array of example indices}``; each example has at most one client.

Source of the Dirichlet partition: Li, Diao, Chen and He, "Federated Learning on Non-IID Data Silos: An Experimental Study",
ICDE 2022, https://arxiv.org/abs/2102.02079. For each category k, p_k ~ Dir(alpha * 1_M) are the shares of its examples that
the M clients get; a client that already holds its even share N / M gets none of the next categories. FedBiscuit (Wu et al.,
ICLR 2025, https://arxiv.org/abs/2407.03038) partitions SHP in this way, with alpha 0.3 over the post's domain.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from fedlight.support.checks import Checked, Settings
from fedlight.support.seeding import derive_seed

Clients = dict[str, np.ndarray]
"""Client id -> indices of its examples."""
DIRICHLET_TRIES = 100


@dataclass(frozen=True)
class Partition(Settings):
    """Settings of a partition; in YAML ``partition: {by: dirichlet, num_clients: 200, alpha: 0.3}``.

    Args:
        by: ``"client"`` (the column mapped to ``client``), ``"dirichlet"`` (over the column mapped to ``category`` or the
            labels of `PseudoLabels`, all examples of one prompt at one client) or ``"iid"``.
        num_clients: number of clients, >= 1; not used by ``"client"``.
        alpha: concentration, > 0; with a small one each client holds few categories. Used by ``"dirichlet"``.
        min_size: fewest examples of a client, >= 1. ``"client"`` drops and counts smaller clients, the others make none.
    """

    by: Literal["client", "dirichlet", "iid"] = "client"
    num_clients: int = 10
    alpha: float = 0.3
    min_size: int = 1

    def split(
        self,
        clients: Sequence[str],
        categories: Sequence[str],
        prompts: Sequence[int] | np.ndarray,
        seed: int,
    ) -> Clients:
        """Return the clients of ``len(prompts)`` examples, from each one's client key, category and prompt number.

        Raises:
            ValueError: a column that the partition needs is not mapped, or the sizes cannot be met.
        """
        if self.by == "client":
            _check_column(clients, "client", self.by)
            return by_key(clients, self.min_size)
        if self.by == "dirichlet":
            _check_column(categories, "category", self.by)
            return dirichlet(categories, self.num_clients, self.alpha, seed, self.min_size, prompts)
        split = iid(len(prompts), self.num_clients, seed, prompts)
        smallest = min(len(indices) for indices in split.values())
        if smallest < self.min_size:
            raise ValueError(
                f"iid over {self.num_clients} clients gives a client {smallest} examples, below min_size={self.min_size}. "
                "Lower one of them."
            )
        return split


class PartitionByField(Checked):
    """Partition of a training set whose examples are tuples or dicts, by one of their fields.

    In YAML, as ``clients`` of a `FederatedWrapper`: ``{class_path: fedlight.PartitionByField, init_args: {partition: {by:
    dirichlet, num_clients: 50}, field: label}}``. Each example is read once.

    Args:
        partition: settings; ``by: client`` takes the field as the client's id, ``by: dirichlet`` as the category of the
            example, and ``by: iid`` ignores it.
        field: position in a tuple or key of a dict; its value is a number, a text, or a tensor of one number.
        seed: seed of the partition.

    Examples:
        >>> examples = [("a", 0), ("b", 1), ("c", 0)]
        >>> {client: list(map(int, i)) for client, i in PartitionByField(Partition(by="client"))(examples).items()}
        {'0': [0, 2], '1': [1]}
    """

    def __init__(self, partition: Partition, field: int | str = 1, seed: int = 0) -> None:
        self.partition = partition
        self.field = field
        self.seed = seed

    def __call__(self, train_set: Dataset | list[Any]) -> Clients:
        """Return client id -> indices into the training set.

        Raises:
            ValueError: examples have no such field, or the sizes of the partition cannot be met.
        """
        indices = range(len(train_set))  # type: ignore[arg-type]
        values = [] if self.partition.by == "iid" else [self._read(train_set[i]) for i in indices]
        return self.partition.split(values, values, indices, self.seed)

    def _read(self, example: Any) -> str:
        try:
            value = example[self.field]
        except (IndexError, KeyError, TypeError) as error:
            raise ValueError(
                f"clients: field={self.field!r} is not in an example of the training set, which is a "
                f"{type(example).__name__}: give the position in a tuple or the key of a dict"
            ) from error
        return str(value.item() if isinstance(value, Tensor) else value)  # "tensor(3)" is no id


def iid(
    num_examples: int, num_clients: int, seed: int, groups: Sequence[int] | np.ndarray | None = None
) -> Clients:
    """Shuffle groups of examples and deal them out evenly: the clients' numbers of groups differ by at most 1.

    Args:
        num_examples: number of examples.
        num_clients: number of clients, >= 1.
        seed: seed of the order.
        groups: group (prompt) of each example; all examples of a group go to one client, so that no client is scored on a
            question that another trains on. None: every example is a group.

    Raises:
        ValueError: there are more clients than groups.

    Examples:
        >>> {client: len(indices) for client, indices in iid(7, 3, seed=0).items()}
        {'c0': 3, 'c1': 2, 'c2': 2}
        >>> [indices.tolist() for indices in iid(4, 2, seed=0, groups=[0, 1, 1, 0]).values()]
        [[0, 3], [1, 2]]
    """
    group_of = np.arange(num_examples) if groups is None else np.unique(groups, return_inverse=True)[1]
    num_groups = int(group_of.max(initial=-1)) + 1
    if not 1 <= num_clients <= num_groups:
        what = "examples" if num_groups == num_examples else "prompts"
        raise ValueError(
            f"num_clients is {num_clients}, but there are {num_groups} {what}: a client would be empty. "
            f"Set num_clients between 1 and {num_groups}."
        )
    parts = np.array_split(_make_rng(seed, "iid").permutation(num_groups), num_clients)
    return _name_clients([np.flatnonzero(np.isin(group_of, part)) for part in parts])


def dirichlet(
    labels: Sequence[str] | np.ndarray,
    num_clients: int,
    alpha: float,
    seed: int,
    min_size: int = 1,
    groups: Sequence[int] | np.ndarray | None = None,
) -> Clients:
    """Divide each category by shares from Dir(alpha), drawn anew until every client has ``min_size`` examples.

    Args:
        labels: category of each example.
        num_clients: number of clients, >= 1.
        alpha: concentration, > 0.
        seed: seed of the draw.
        min_size: fewest examples of a client.
        groups: as in `iid`; a group has the category of its first example.

    Raises:
        ValueError: ``alpha`` is not above 0, only one category, or ``min_size`` not reached in 100 draws.

    Examples:
        >>> split = dirichlet(["x"] * 6 + ["y"] * 6, num_clients=2, alpha=0.05, seed=1, min_size=3)
        >>> sorted(len(indices) for indices in split.values())
        [6, 6]
    """
    labels = _in_a_row(np.asarray(labels), "labels")
    _check_dirichlet(labels, num_clients, alpha, min_size)
    group_of = (
        np.arange(len(labels)) if groups is None else np.unique(groups, return_inverse=True)[1].reshape(-1)
    )
    _, first = np.unique(group_of, return_index=True)  # the example whose category is that of the group
    sizes = np.bincount(group_of)  # [groups]
    for attempt in range(DIRICHLET_TRIES):
        owner = _draw_owners(labels[first], sizes, num_clients, alpha, _make_rng(seed, "dirichlet", attempt))
        if np.bincount(owner, weights=sizes, minlength=num_clients).min() >= min_size:
            return _name_clients([np.flatnonzero(owner[group_of] == client) for client in range(num_clients)])
    raise ValueError(
        f"Dirichlet(alpha={alpha}) left a client with fewer than min_size={min_size} of {len(labels)} examples in each "
        f"of {DIRICHLET_TRIES} draws. Lower num_clients (now {num_clients}) or min_size, or raise alpha."
    )


def by_key(keys: Sequence[str] | np.ndarray, min_size: int = 1) -> Clients:
    """Return one client per key (a worker's id), without keys that have fewer than ``min_size`` examples.

    Raises:
        ValueError: no key has ``min_size`` examples.

    Examples:
        >>> {client: indices.tolist() for client, indices in by_key(["u", "v", "u"], min_size=2).items()}
        {'u': [0, 2]}
    """
    row = _in_a_row(np.asarray(keys, dtype=str), "keys")
    names, key_of, counts = np.unique(row, return_inverse=True, return_counts=True)
    # Stable, so that each part is one key's indices in ascending order.
    starts = np.split(np.argsort(key_of, kind="stable"), np.cumsum(counts)[:-1])
    split = {str(name): part for name, part in zip(names, starts, strict=True) if len(part) >= min_size}
    if not split:
        raise ValueError(
            f"min_size={min_size} is above the {counts.max(initial=0)} examples of the largest client: lower it"
        )
    return split


def _in_a_row(values: np.ndarray, name: str) -> np.ndarray:
    """Return one value of each example, ``(examples,)``, also of those in a column; raise ValueError for several."""
    if values.size != len(values):
        raise ValueError(f"{name} has the shape {values.shape}: give one value for each example")
    return values.reshape(-1)


def _draw_owners(
    labels: np.ndarray, sizes: np.ndarray, num_clients: int, alpha: float, rng: np.random.Generator
) -> np.ndarray:
    """Return the client of every group, ``(groups,)``."""
    owner = np.zeros(len(labels), dtype=np.int64)  # [groups]
    held = np.zeros(num_clients)  # examples of each client so far
    even_share = sizes.sum() / num_clients  # N / M of the source
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))  # cut in a random order
        shares = rng.dirichlet(np.full(num_clients, alpha)) * (held < even_share)  # none for full ones
        # A tiny alpha can put all mass on full clients, or underflow to 0 / 0: then clients with room share evenly.
        if not np.isfinite(shares).all() or shares.sum() <= 0:
            shares = (held < even_share).astype(float)
        cuts = np.cumsum(shares / shares.sum())
        # A group goes to the client whose share contains the middle of the group's examples.
        middles = (np.cumsum(sizes[members]) - sizes[members] / 2) / sizes[members].sum()
        # Rounding may leave the last cut below 1.
        owner[members] = np.minimum(np.searchsorted(cuts, middles), num_clients - 1)
        held += np.bincount(owner[members], weights=sizes[members], minlength=num_clients)
    return owner


def _check_dirichlet(labels: np.ndarray, num_clients: int, alpha: float, min_size: int) -> None:
    if not alpha > 0:  # NaN too
        raise ValueError(f"alpha is {alpha}, but a Dirichlet distribution needs alpha > 0, for example 0.3.")
    if not 1 <= num_clients * max(min_size, 1) <= len(labels):
        raise ValueError(
            f"{num_clients} clients with min_size={min_size} need {num_clients * max(min_size, 1)} examples, but there are "
            f"{len(labels)}. Lower num_clients or min_size."
        )
    if len(np.unique(labels)) == 1:
        raise ValueError(
            f"every example has the category '{labels[0]}', so a Dirichlet partition cannot divide by category. "
            "Map `category` to another column, or use partition.by=iid."
        )


def _check_column(values: Sequence[str], name: str, by: str) -> None:
    if not values:
        other = ", or pseudo_labels to make categories" if name == "category" else ""
        raise ValueError(
            f"partition.by={by} needs the column map to name `{name}`, for example columns.{name}: worker{other}."
        )


def _name_clients(parts: Sequence[np.ndarray]) -> Clients:
    width = len(str(len(parts) - 1))  # ids of equal length sort in the order of their numbers
    return {f"c{client:0{width}d}": np.sort(part) for client, part in enumerate(parts)}


def _make_rng(seed: int, *purpose: int | str) -> np.random.Generator:
    return np.random.default_rng(derive_seed(seed, "partition", *purpose))
