"""Which public rows a client is given: by its one chosen centre (FedDCA), or by all of its own (direct retrieval).

Wang et al. (FedDCA), https://arxiv.org/abs/2409.20135: Algorithm 1, lines 14 to 18, and Algorithm 2 of appendix A.3.
Rows of a similarity of ``alpha`` or more are passed over, as they may repeat what the client has. A client is never given
a row twice; two clients may be given the same one.
"""

from collections.abc import Mapping

import numpy as np

from fedlight.datamodules.vectors.vector_index import Hits, VectorIndex


def retrieve(
    index: VectorIndex, centers: Mapping[str, np.ndarray], number: int, alpha: float | None
) -> dict[str, Hits]:
    """The ``number`` rows most similar to each client's centre, of those below ``alpha``.

    Args:
        index: of the public rows.
        centers: client -> the centre that was chosen for it, ``(dimension,)``.
        number: rows per client, >= 1; a client gets fewer where fewer are below ``alpha``.
        alpha: similarity from which rows are passed over, in (-1, 1]; None passes over none.

    Raises:
        ValueError: ``number`` < 1, or a centre of another dimension than the index.

    Example:
        >>> index = VectorIndex.build(np.array([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]], dtype=np.float32))
        >>> hits = retrieve(index, {"u": np.array([1.0, 0.0])}, number=2, alpha=0.7)
        >>> hits["u"].rows.tolist(), hits["u"].scores.round(2).tolist()
        ([1, 2], [0.6..., 0.0])
    """
    if not centers:
        return {}
    found = index.search(_stacked(centers), number, below=alpha)
    return dict(zip(centers, found, strict=True))


def retrieve_direct(index: VectorIndex, centers: np.ndarray, number: int, alpha: float | None = None) -> Hits:
    """``number`` rows, evenly over the client's centres: each takes its most similar ones that no earlier centre took.

    Where ``number`` cannot be divided by the number of centres, the first ones take one row more. Where a centre finds
    fewer than its share, the most similar rows left of the others fill up.

    Args:
        index: of the public rows.
        centers: of one client, ``(clusters, dimension)``.
        number: rows in all, >= 1.
        alpha: similarity to the centre that takes it from which a row is passed over; None, the paper's, passes over none.

    Returns:
        Rows and their similarity to the centre that took them, best first.

    Raises:
        ValueError: as :func:`retrieve`.

    Example:
        >>> index = VectorIndex.build(np.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]], dtype=np.float32))
        >>> retrieve_direct(index, np.array([[1.0, 0.0], [0.6, 0.8]]), number=2).rows.tolist()
        [0, 1]
    """
    found = index.search(centers, number, below=alpha)
    taken: dict[int, float] = {}
    for position, hits in enumerate(found):
        share = number // len(found) + (position < number % len(found))
        taken.update(_first(hits, share, taken))
    if len(taken) < number:
        rows = np.concatenate([hits.rows for hits in found])
        scores = np.concatenate([hits.scores for hits in found])
        order = np.lexsort((rows, -scores))
        taken.update(_first(Hits(rows[order], scores[order]), number - len(taken), taken))
    rows = np.fromiter(taken.keys(), dtype=np.int64, count=len(taken))
    scores = np.fromiter(taken.values(), dtype=np.float32, count=len(taken))
    order = np.lexsort((rows, -scores))
    return Hits(rows[order], scores[order])


def _first(hits: Hits, share: int, taken: Mapping[int, float]) -> dict[int, float]:
    """The first ``share`` hits that are not taken yet, each row once."""
    fresh: dict[int, float] = {}
    for row, score in zip(hits.rows.tolist(), hits.scores.tolist(), strict=True):
        if len(fresh) == share:
            break
        if row not in taken and row not in fresh:
            fresh[row] = score
    return fresh


def _stacked(centers: Mapping[str, np.ndarray]) -> np.ndarray:
    """``(clients, dimension)``."""
    shapes = {np.shape(center) for center in centers.values()}
    if len(shapes) > 1:
        raise ValueError(f"the clients' centres differ in shape ({sorted(shapes)}): use one encoder for all")
    return np.stack([np.asarray(center) for center in centers.values()])
