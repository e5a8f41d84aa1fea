"""Exact cosine search, block by block: the reference of the approximate index, and its fallback."""

from typing import NamedTuple

import numpy as np

ROWS_AT_ONCE = 16_384
QUERIES_AT_ONCE = 256


class Hits(NamedTuple):
    """What one query found, best first, no row twice; equal scores in the order of their rows.

    Attributes:
        rows: positions in the index, ``(hits,)`` int64.
        scores: cosines, ``(hits,)`` float32.
    """

    rows: np.ndarray
    scores: np.ndarray


def exact_search(
    vectors: np.ndarray, queries: np.ndarray, number: int, below: float | None = None
) -> list[Hits]:
    """The ``number`` rows most similar to each query, of those below ``below``.

    At most ``QUERIES_AT_ONCE x (ROWS_AT_ONCE + number)`` scores are held at once, so memory does not grow with the rows.

    Args:
        vectors: ``(rows, dimension)`` float32, unit length; may be a memory map.
        queries: ``(queries, dimension)`` float32, unit length.
        number: hits per query, >= 1; fewer where there are fewer.
        below: rows with this score or more are passed over; None passes over none.

    Example:
        >>> hits = exact_search(np.eye(3, dtype=np.float32), np.array([[0.6, 0.8, 0.0]], dtype=np.float32), 2)
        >>> hits[0].rows.tolist()
        [1, 0]
    """
    found = []
    for start in range(0, len(queries), QUERIES_AT_ONCE):
        some = queries[start : start + QUERIES_AT_ONCE]
        best = [Hits(np.empty(0, np.int64), np.empty(0, np.float32))] * len(some)
        for first in range(0, len(vectors), ROWS_AT_ONCE):
            scores = some @ np.asarray(vectors[first : first + ROWS_AT_ONCE]).T
            best = [_merge(hits, new, first, number, below) for hits, new in zip(best, scores, strict=True)]
        found += best
    return found


def best_first(rows: np.ndarray, scores: np.ndarray, number: int) -> Hits:
    """The ``number`` best of some hits.

    Example:
        >>> best_first(np.array([7, 3, 5]), np.array([0.5, 0.5, 0.9]), number=2).rows.tolist()
        [5, 3]
    """
    if len(scores) > number:
        worst = np.partition(scores, len(scores) - number)[len(scores) - number]
        candidates = np.flatnonzero(scores >= worst)  # a little more than number where scores are equal
        rows, scores = rows[candidates], scores[candidates]
    order = np.lexsort((rows, -scores))[:number]
    return Hits(rows[order].astype(np.int64), scores[order].astype(np.float32))


def _merge(hits: Hits, scores: np.ndarray, first: int, number: int, below: float | None) -> Hits:
    """The best of what was found before and of the block that begins at row ``first``."""
    keep = np.full(len(scores), True) if below is None else scores < below
    if len(hits.scores) == number:
        keep &= scores > hits.scores[-1]  # later rows lose against equal earlier ones
    rows = np.flatnonzero(keep)
    if not len(rows):
        return hits
    return best_first(
        np.concatenate([hits.rows, rows + first]), np.concatenate([hits.scores, scores[rows]]), number
    )
