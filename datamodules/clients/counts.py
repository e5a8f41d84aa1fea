"""Who has how much of what: the examples of each client, by label.

What Figure 3 of FedBiscuit (Wu et al., ICLR 2025, https://arxiv.org/abs/2407.03038) and Figure 4 of FedDCA (Wang et al.,
2024, https://arxiv.org/abs/2409.20135) show of their data.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np


class ClientCount(NamedTuple):
    """Examples of one label that one client has.

    Attributes:
        client: its id.
        label: what they are about; empty where the data do not say.
        split: ``train`` or ``val``.
        rows: how many there are; a vote that a selector sees in both orders is two.
    """

    client: str
    label: str
    split: str
    rows: int


def count_labels(
    split: str, clients: Mapping[str, np.ndarray], labels: Sequence[str] | None
) -> list[ClientCount]:
    """The counts of one set, clients in their order, labels by name.

    Args:
        split: what the set is for.
        clients: client id -> indices of its examples.
        labels: of every example; None where the data do not say.

    Example:
        >>> clients = {"u": np.array([0, 2, 3]), "v": np.array([1])}
        >>> [tuple(count) for count in count_labels("train", clients, ["tea", "rice", "jam", "tea"])]
        [('u', 'jam', 'train', 1), ('u', 'tea', 'train', 2), ('v', 'rice', 'train', 1)]
        >>> [tuple(count) for count in count_labels("val", clients, None)]
        [('u', '', 'val', 3), ('v', '', 'val', 1)]
    """
    found: list[ClientCount] = []
    for client, own in clients.items():
        counts = Counter({"": len(own)}) if labels is None else Counter(labels[index] for index in own)
        found += [ClientCount(client, label, split, rows) for label, rows in sorted(counts.items())]
    return found


def labels_of(categories: Sequence[str], order: np.ndarray, each: int = 1) -> list[str] | None:
    """The labels of a set, example by example.

    Args:
        categories: of the rows that examples are made of; empty where the data do not say.
        order: of the set, as indices of examples; those of no row were added and are labelled so.
        each: so many neighbouring examples are of one row.

    Example:
        >>> labels_of(["tea", "jam"], np.array([1, 2, 0])), labels_of(["tea", "jam"], np.array([3, 0]), each=2)
        (['jam', 'added', 'tea'], ['jam', 'tea'])
        >>> labels_of([], np.array([0])) is None
        True
    """
    if not categories:
        return None
    rows = order // each
    return [categories[row] if row < len(categories) else "added" for row in rows]
