"""k-means on unit vectors: what a client of FedDCA sends of its instructions, and pseudo labels for the heterogeneity study.

Wang et al. (FedDCA), "Federated Instruction Tuning of LLMs with Domain Coverage Augmentation",
https://arxiv.org/abs/2409.20135: Algorithm 1, line 3 (xi = 10 clusters at each client), and appendix A.2.1 (pseudo labels
from 100 clusters, dealt out by a Dirichlet distribution). k-means is scikit-learn's. Deviations, which the paper leaves
open: centres are scaled to unit length, as similarities are cosines; clusters come largest first; pseudo labels are
fitted to at most 20,000 rows, drawn by the seed, and given to all.
"""

import warnings
from typing import NamedTuple

import numpy as np

from fedlight.support.seeding import derive_seed

STARTS = 4
FITTED_ROWS = 20_000


class Clusters(NamedTuple):
    """What a client sends: no text, no vector of a single instruction unless a cluster has one member only.

    Attributes:
        centers: ``(clusters, dimension)`` float32, unit length, largest cluster first.
        sizes: members of each, ``(clusters,)`` int64.
    """

    centers: np.ndarray
    sizes: np.ndarray


def cluster(vectors: np.ndarray, num_clusters: int, seed: int) -> Clusters:
    """Unit centres and sizes of at most ``num_clusters`` clusters; fewer where fewer distinct vectors are.

    Args:
        vectors: ``(rows, dimension)``, unit length.
        num_clusters: xi, >= 1.
        seed: of the starting points.

    Raises:
        ValueError: no vectors, or ``num_clusters`` < 1.

    Example:
        >>> found = cluster(np.array([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]), num_clusters=5, seed=0)
        >>> found.centers.tolist(), found.sizes.tolist()
        ([[1.0, 0.0], [0.0, 1.0]], [2, 1])
    """
    vectors = np.asarray(vectors, dtype=np.float32)
    labels = _fit(vectors, num_clusters, seed)[0]
    sizes = np.bincount(labels)
    order = np.argsort(-sizes, kind="stable")
    order = order[sizes[order] > 0]
    centers = np.stack([_unit_mean(vectors[labels == label]) for label in order])
    return Clusters(centers, sizes[order].astype(np.int64))


def pseudo_labels(vectors: np.ndarray, num_labels: int, seed: int) -> np.ndarray:
    """The cluster of each row, as a category where the data names none.

    Args:
        vectors: ``(rows, dimension)``, unit length.
        num_labels: number of clusters, >= 1; there are fewer where fewer distinct vectors are.
        seed: of the starting points, and of the rows that are fitted.

    Returns:
        ``(rows,)`` int64, in [0, ``num_labels``).

    Raises:
        ValueError: see :func:`cluster`.

    Example:
        >>> one, other, again = pseudo_labels(np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]), 2, seed=0)
        >>> bool(one == again), bool(one == other)
        (True, False)
    """
    vectors = np.asarray(vectors, dtype=np.float32)
    if len(vectors) <= FITTED_ROWS:
        return _fit(vectors, num_labels, seed)[0]
    rng = np.random.default_rng(derive_seed(seed, "rows for pseudo labels"))
    fitted = vectors[np.sort(rng.choice(len(vectors), FITTED_ROWS, replace=False))]
    centers = _fit(fitted, num_labels, seed)[1]
    offsets = (centers**2).sum(axis=1)
    blocks = (vectors[start : start + FITTED_ROWS] for start in range(0, len(vectors), FITTED_ROWS))
    return np.concatenate([(offsets - 2 * block @ centers.T).argmin(axis=1) for block in blocks])


def _fit(vectors: np.ndarray, num_clusters: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Labels ``(rows,)`` and means ``(clusters, dimension)``."""
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    if num_clusters < 1:
        raise ValueError(f"num_clusters={num_clusters}: k-means needs at least 1 cluster, for example 10")
    if vectors.ndim != 2 or not len(vectors):
        raise ValueError(
            f"k-means needs vectors of shape (rows, dimension) and at least one row, not {vectors.shape}"
        )
    k_means = KMeans(
        n_clusters=_distinct(vectors, num_clusters),
        n_init=STARTS,
        random_state=derive_seed(seed, "k-means"),
    )
    with warnings.catch_warnings():
        # Vectors that differ in their last bits alone may share a cluster; empty ones are left out above.
        warnings.simplefilter("ignore", ConvergenceWarning)
        k_means.fit(vectors)
    return k_means.labels_.astype(np.int64), k_means.cluster_centers_


def _distinct(vectors: np.ndarray, enough: int) -> int:
    """How many different rows there are, counted up to ``enough``."""
    seen: set[bytes] = set()
    for row in vectors:
        seen.add((row + 0.0).tobytes())  # -0.0 equals 0.0
        if len(seen) == enough:
            break
    return len(seen)


def _unit_mean(members: np.ndarray) -> np.ndarray:
    mean = members.mean(axis=0, dtype=np.float64)
    length = np.linalg.norm(mean)
    # Opposite vectors have no direction in common: then a member stands for them.
    return (mean / length if length > 1e-6 else members[0]).astype(np.float32)
