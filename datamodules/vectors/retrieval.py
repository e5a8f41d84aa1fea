"""Retrieval of public rows by a client's one selected centre (FedDCA), or by all of its centres (direct retrieval).

Wang et al. (FedDCA), https://arxiv.org/abs/2409.20135: Algorithm 1, lines 14 to 18, and Algorithm 2 of appendix A.3.
Rows with a similarity of ``alpha`` or more are skipped: they may repeat private rows of the client. A client never
gets a row twice; two clients may get the same row.
"""

from collections.abc import Mapping

import numpy as np

from fedlight.datamodules.vectors.vector_index import Hits, VectorIndex


def retrieve(
    index: VectorIndex, centers: Mapping[str, np.ndarray], number: int, alpha: float | None
) -> dict[str, Hits]:
    """Return the ``number`` rows most similar to each client's centre, among rows with a similarity below ``alpha``.

    A client gets fewer rows if fewer are below ``alpha``, in (-1, 1]; None skips none. Centres are ``(dimension,)``.

    Raises:
        ValueError: ``number`` < 1, or a centre has another dimension than the index.

    Examples:
        >>> index = VectorIndex.build(np.array([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]], dtype=np.float32))
        >>> hits = retrieve(index, {"u": np.array([1.0, 0.0])}, number=2, alpha=0.7)
        >>> hits["u"].rows.tolist(), hits["u"].scores.round(2).tolist()
        ([1, 2], [0.6..., 0.0])
    """
    if not centers:
        return {}
    shapes = {np.shape(center) for center in centers.values()}
    if len(shapes) > 1:
        raise ValueError(f"the clients' centres differ in shape ({sorted(shapes)}): use one encoder for all")
    nearest = index.search(np.stack([np.asarray(center) for center in centers.values()]), number, below=alpha)
    return dict(zip(centers, nearest, strict=True))


def retrieve_direct(index: VectorIndex, centers: np.ndarray, number: int, alpha: float | None = None) -> Hits:
    """Return ``number`` rows, divided evenly over the client's centres, best first, with their similarity to their centre.

    Each centre takes its most similar rows below ``alpha`` (in the paper all) that no earlier centre took. If ``number`` is
    not a multiple of the number of centres, the first centres take one row more. If a centre finds fewer rows than its
    share, the most similar remaining rows of the other centres fill the gap. Centres are ``(clusters, dimension)``.

    Raises:
        ValueError: see `retrieve`.

    Examples:
        >>> index = VectorIndex.build(np.array([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]], dtype=np.float32))
        >>> retrieve_direct(index, np.array([[1.0, 0.0], [0.6, 0.8]]), number=2).rows.tolist()
        [0, 1]
    """
    nearest = index.search(centers, number, below=alpha)
    taken: dict[int, float] = {}
    for position, hits in enumerate(nearest):
        share = number // len(nearest) + (position < number % len(nearest))
        taken.update(_take_first(hits, share, taken))
    if len(taken) < number:
        rows = np.concatenate([hits.rows for hits in nearest])  # of all centres
        scores = np.concatenate([hits.scores for hits in nearest])
        order = np.lexsort((rows, -scores))  # best first, of equal ones the earlier row
        taken.update(_take_first(Hits(rows[order], scores[order]), number - len(taken), taken))
    rows = np.fromiter(taken.keys(), dtype=np.int64, count=len(taken))
    scores = np.fromiter(taken.values(), dtype=np.float32, count=len(taken))
    order = np.lexsort((rows, -scores))
    return Hits(rows[order], scores[order])


def _take_first(hits: Hits, share: int, taken: Mapping[int, float]) -> dict[int, float]:
    """Return row and score of the first ``share`` hits that are not taken yet, each row once."""
    fresh: dict[int, float] = {}
    for row, score in zip(hits.rows.tolist(), hits.scores.tolist(), strict=True):
        if len(fresh) == share:
            break
        if row not in taken and row not in fresh:
            fresh[row] = score
    return fresh
