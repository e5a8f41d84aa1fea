"""Greedy selection of client centres: who is retrieved for what, so that together the clients cover the domain.

Wang et al. (FedDCA), https://arxiv.org/abs/2409.20135, Algorithm 1, lines 6 to 13. Clients come in a random order. The
first gives the centre of its largest cluster. Of the i-th further client (i = 1, 2, ...) those centres are left out that
have the largest summed similarity to the centres chosen so far, and the largest remaining cluster's is taken.

How many are left out, of N clients with xi centres, the paper says in two ways:

* ``drop_i``: i of them, at most all but one. So say the text of section 4.2 and the comment beside line 9.
* ``keep_n_minus_i``: all but the N - i least similar. So line 9 is printed, "(N - i)-arg sort(S)".

With xi = N, as in the paper's main experiments, both are the same. With more centres than clients (figure 10: up to
8 N) the printed line leaves xi - N more of them out, with fewer it leaves N - xi less.

The paper states O(N (N xi + xi log xi)). A similarity summed over all chosen centres is the product with their sum, so
one product per centre is enough: O(N (xi + xi log xi)), with the same choice. Left open there and fixed here: of equally
large clusters the less similar one is taken, of equally similar ones the smaller is left out, and otherwise the first
one is taken.
"""

from collections.abc import Mapping
from typing import Literal, get_args

import numpy as np

from fedlight.datamodules.clients.clusters import Clusters
from fedlight.support.seeding import derive_seed

Selection = Literal["drop_i", "keep_n_minus_i"]
"""How many similar centres are left out; see above."""


def select_centers(
    clusters: Mapping[str, Clusters], seed: int, selection: Selection = "drop_i"
) -> dict[str, int]:
    """The index of each client's chosen centre.

    Args:
        clusters: client -> its centres and sizes; centres of one dimension for all.
        seed: of the order of the clients, which does not depend on the order of the mapping.
        selection: how many similar centres are left out: ``drop_i`` or ``keep_n_minus_i``; see the module.

    Returns:
        Client -> index into its centres, in the order in which the clients had their turn.

    Raises:
        ValueError: a client has no centres, or one of another dimension, or there is no such selection.

    Example:
        Both clients know the same two topics. The first gives its larger cluster, the second the other topic, although
        its cluster there is smaller.

        >>> centers = np.eye(2, dtype=np.float32)
        >>> same = Clusters(centers, np.array([60, 40]))
        >>> sorted(select_centers({"u": same, "v": same}, seed=0).values())
        [0, 1]
    """
    check_selection(selection)
    if not clusters:
        return {}
    _check(clusters)
    names = sorted(clusters)
    rng = np.random.default_rng(derive_seed(seed, "order of centres"))
    chosen: dict[str, int] = {}
    total = np.zeros(clusters[names[0]].centers.shape[1])
    for turn, number in enumerate(rng.permutation(len(names))):
        own = clusters[names[number]]
        centers = own.centers.astype(np.float64)
        left_out = turn
        if selection == "keep_n_minus_i" and turn:  # the first one chooses before the loop of line 7
            left_out = max(len(centers) - (len(names) - turn), 0)
        index = choose(centers @ total, own.sizes, left_out)
        chosen[names[number]] = index
        total += centers[index]
    return chosen


def choose(similarities: np.ndarray, sizes: np.ndarray, left_out: int) -> int:
    """The largest cluster after the most similar ones are left out.

    Args:
        similarities: of each centre to all chosen ones, summed, ``(clusters,)``.
        sizes: ``(clusters,)``.
        left_out: how many of the most similar to leave out, >= 0; one always stays.

    Example:
        >>> choose(np.array([0.9, 0.1, 0.5]), np.array([50, 10, 40]), left_out=1)
        2
        >>> choose(np.array([0.9, 0.1, 0.5]), np.array([50, 10, 40]), left_out=7)
        1
    """
    by_similarity = np.lexsort((sizes, -similarities))  # of equally similar ones the smaller first
    kept = by_similarity[min(left_out, len(sizes) - 1) :]
    return int(kept[np.lexsort((kept, similarities[kept], -sizes[kept]))[0]])


def check_selection(selection: str) -> None:
    """There are two ways.

    Raises:
        ValueError: ``selection`` is none of them.
    """
    if selection not in get_args(Selection):
        raise ValueError(
            f"selection={selection!r} must be one of {', '.join(get_args(Selection))}, see "
            "fedlight.datamodules.vectors.selection."
        )


def _check(clusters: Mapping[str, Clusters]) -> None:
    shapes = {name: own.centers.shape for name, own in clusters.items()}
    dimension = next(iter(shapes.values()))[1:]
    for name, shape in shapes.items():
        if len(shape) != 2 or not shape[0] or len(clusters[name].sizes) != shape[0]:
            raise ValueError(
                f"client {name!r} sent centres of shape {shape} and {len(clusters[name].sizes)} sizes: "
                "give (clusters, dimension) with at least one cluster, and one size for each"
            )
        if shape[1:] != dimension:
            raise ValueError(
                f"client {name!r} sent centres of {shape[1]} dimensions, others of {dimension[0]}: use one encoder, "
                "or project the centres first (FedDCAStar)"
            )
