"""k-means on unit vectors: clusters of a client's instructions, and pseudo labels for rows without categories.

Wang et al. (FedDCA), "Federated Instruction Tuning of LLMs with Domain Coverage Augmentation",
https://arxiv.org/abs/2409.20135: Algorithm 1, line 3 (xi = 10 clusters at each client), and appendix A.2.1 (100 clusters as
labels over which a Dirichlet distribution with alpha 0.01, 0.1, 1 and 10 makes the clients unlike each other). k-means is
scikit-learn's. Deviations, which the paper leaves open: centres are scaled to unit length, as similarities are cosines;
clusters come largest first; pseudo labels are fitted to at most 20,000 rows, drawn by the seed, and assigned to all.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedlight.datamodules.rows.fields import instruction_text
from fedlight.datamodules.vectors.encoders import Encoder
from fedlight.support.checks import Settings, refuse_below
from fedlight.support.seeding import derive_seed
from fedlight.support.types import Fields

STARTS = 4
FITTED_ROWS = 20_000


class Clusters(NamedTuple):
    """Clusters that a client uploads: no text, and an instruction's own vector only where a cluster has one member."""

    centers: np.ndarray  # ``(clusters, dimension)`` float32, unit length, largest cluster first
    sizes: np.ndarray  # members of each cluster, ``(clusters,)`` int64


def cluster(vectors: np.ndarray, num_clusters: int, seed: int) -> Clusters:
    """Return unit centres and sizes of clusters, fewer than ``num_clusters`` where fewer distinct vectors exist.

    Vectors are ``(rows, dimension)``, at least one row, of unit length; ``num_clusters`` is xi, >= 1. The starting points
    have the seed.

    Examples:
        >>> clusters = cluster(np.array([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]), num_clusters=5, seed=0)
        >>> clusters.centers.tolist(), clusters.sizes.tolist()
        ([[1.0, 0.0], [0.0, 1.0]], [2, 1])
    """
    vectors = np.asarray(vectors, dtype=np.float32)
    labels = _fit(vectors, num_clusters, seed)[0]
    sizes = np.bincount(labels)
    order = np.argsort(-sizes, kind="stable")
    order = order[sizes[order] > 0]  # k-means may leave a cluster empty
    centers = np.stack([_unit_mean(vectors[labels == label]) for label in order])
    return Clusters(centers, sizes[order].astype(np.int64))


@dataclass(frozen=True)
class PseudoLabels(Settings):
    """k-means labels for all rows; in YAML ``pseudo_labels: {encoder: {class_path: SentenceEncoder, ...}, number: 100}``.

    Args:
        encoder: encoder of the instructions.
        number: number of labels, >= 2; fewer where fewer distinct instructions exist.
    """

    encoder: Encoder
    number: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_below(2, "pseudo_labels.", number=self.number)

    def label(self, rows: Sequence[Fields], seed: int) -> list[str]:
        """Return a label such as ``"k07"`` for each row, a function of the instructions and the seed."""
        vectors = self.encoder.encode([instruction_text(row) for row in rows])
        labels = assign_clusters(vectors, self.number, derive_seed(seed, "pseudo labels"))
        return name_clusters(labels, self.number)


def name_clusters(labels: np.ndarray, number: int) -> list[str]:
    """Return names such as ``"k07"``, with as many digits as the largest of ``number`` clusters needs."""
    width = len(str(number - 1))  # names sort like their numbers
    return [f"k{label:0{width}d}" for label in labels]


def assign_clusters(vectors: np.ndarray, num_clusters: int, seed: int) -> np.ndarray:
    """Return the cluster of each row, ``(rows,)`` int64 in [0, ``num_clusters``); arguments as `cluster`.

    The seed also draws the rows that are fitted.

    Examples:
        >>> first, second, again = assign_clusters(np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]), 2, seed=0)
        >>> bool(first == again), bool(first == second)
        (True, False)
    """
    vectors = np.asarray(vectors, dtype=np.float32)
    if len(vectors) <= FITTED_ROWS:
        return _fit(vectors, num_clusters, seed)[0]
    rng = np.random.default_rng(derive_seed(seed, "rows for pseudo labels"))
    fitted = vectors[np.sort(rng.choice(len(vectors), FITTED_ROWS, replace=False))]
    centers = _fit(fitted, num_clusters, seed)[1]  # [clusters, dimension]
    offsets = (centers**2).sum(axis=1)  # of |x - c|^2 = |x|^2 + |c|^2 - 2 x c; |x|^2 is alike for all c
    blocks = (vectors[start : start + FITTED_ROWS] for start in range(0, len(vectors), FITTED_ROWS))
    return np.concatenate([(offsets - 2 * block @ centers.T).argmin(axis=1) for block in blocks])


def _fit(vectors: np.ndarray, num_clusters: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return labels ``(rows,)`` and means ``(clusters, dimension)``."""
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    if num_clusters < 1:
        raise ValueError(f"num_clusters={num_clusters}: k-means needs at least 1 cluster, for example 10")
    if vectors.ndim != 2 or not len(vectors):
        raise ValueError(
            f"k-means needs vectors of shape (rows, dimension) and at least one row, not {vectors.shape}"
        )
    distinct = len({row.tobytes() for row in vectors + 0.0})  # + 0.0: -0.0 equals 0.0
    k_means = KMeans(min(num_clusters, distinct), n_init=STARTS, random_state=derive_seed(seed, "k-means"))
    with warnings.catch_warnings():
        # Vectors that differ only in their last bits may share a cluster; `cluster` leaves empty ones out.
        warnings.simplefilter("ignore", ConvergenceWarning)
        k_means.fit(vectors)
    return k_means.labels_.astype(np.int64), k_means.cluster_centers_


def _unit_mean(members: np.ndarray) -> np.ndarray:
    mean = members.mean(axis=0, dtype=np.float64)
    length = np.linalg.norm(mean)
    # The mean of opposite vectors has no direction; a member replaces it.
    return (mean / length if length > 1e-6 else members[0]).astype(np.float32)
