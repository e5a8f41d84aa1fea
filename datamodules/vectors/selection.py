"""Greedy selection of one centre per client, so that the clients together cover the domain.

Wang et al. (FedDCA), https://arxiv.org/abs/2409.20135, Algorithm 1, lines 6 to 13. Clients come in a random order. The
first client's selected centre is that of its largest cluster. For the i-th further client (i = 1, 2, ...), the centres
with the largest summed similarity to the centres selected so far are dropped; of the others, the largest cluster's centre
is selected.

The paper gives two numbers of dropped centres, for N clients with xi centres each:

* ``drop_i``: i centres, at most xi - 1 (text of section 4.2 and comment beside line 9).
* ``keep_n_minus_i``: all but the N - i least similar centres (line 9 as printed, "(N - i)-arg sort(S)").

With xi = N, as in the paper's main experiments, both are the same. With xi > N (figure 10: up to 8 N) the printed line
drops xi - N centres more, with xi < N it drops N - xi less.

The paper states O(N (N xi + xi log xi)). A similarity summed over all selected centres is the product with their sum, so
one product per centre is enough: O(N (xi + xi log xi)), with the same result. The paper leaves ties open. Here, of equally
large clusters the less similar one is selected, of equally similar ones the smaller is dropped, and otherwise the first
one is selected.
"""

from collections.abc import Mapping
from typing import Literal, get_args

import numpy as np

from fedlight.datamodules.vectors.clusters import Clusters
from fedlight.support.checks import check_choice
from fedlight.support.seeding import derive_seed

Selection = Literal["drop_i", "keep_n_minus_i"]


def select_centers(
    clusters: Mapping[str, Clusters], seed: int, selection: Selection = "drop_i"
) -> dict[str, int]:
    """Return the index of each client's selected centre, in the order of the clients' turns.

    That order depends on the seed alone, not on the order of the mapping. For ``selection`` see the module.

    Raises:
        ValueError: a client has no centres, a centre has another dimension, or ``selection`` is unknown.

    Examples:
        Both clients have the same two topics. The first client's larger cluster is selected, then the second client's
        other topic, although its cluster is smaller.

        >>> centers = np.eye(2, dtype=np.float32)
        >>> same = Clusters(centers, np.array([60, 40]))
        >>> sorted(select_centers({"u": same, "v": same}, seed=0).values())
        [0, 1]
    """
    check_choice("selection", selection, get_args(Selection))
    if not clusters:
        return {}
    _check(clusters)
    names = sorted(clusters)  # the draw must not depend on the mapping's order
    rng = np.random.default_rng(derive_seed(seed, "order of centres"))
    chosen: dict[str, int] = {}
    total = np.zeros(clusters[names[0]].centers.shape[1])  # of selected centres
    for turn, number in enumerate(rng.permutation(len(names))):
        of_client = clusters[names[number]]
        centers = of_client.centers.astype(np.float64)  # [clusters, dimension]
        dropped = turn  # i of drop_i
        if selection == "keep_n_minus_i" and turn:  # the first client's turn is before the loop of line 7
            dropped = max(len(centers) - (len(names) - turn), 0)
        index = choose(centers @ total, of_client.sizes, dropped)  # summed similarities: one product
        chosen[names[number]] = index
        total += centers[index]
    return chosen


def choose(similarities: np.ndarray, sizes: np.ndarray, dropped: int) -> int:
    """Return the index of the largest cluster after the ``dropped`` most similar ones are dropped; one always stays.

    ``similarities`` ``(clusters,)`` are each centre's, summed over all selected centres.

    Examples:
        >>> choose(np.array([0.9, 0.1, 0.5]), np.array([50, 10, 40]), dropped=1)
        2
        >>> choose(np.array([0.9, 0.1, 0.5]), np.array([50, 10, 40]), dropped=7)
        1
    """
    by_similarity = np.lexsort((sizes, -similarities))  # of equally similar ones the smaller first
    kept = by_similarity[min(dropped, len(sizes) - 1) :]
    # Of equally large clusters the least similar one, and of those the first.
    return int(kept[np.lexsort((kept, similarities[kept], -sizes[kept]))[0]])


def _check(clusters: Mapping[str, Clusters]) -> None:
    shapes = {name: of_client.centers.shape for name, of_client in clusters.items()}
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
