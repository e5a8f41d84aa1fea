"""Recall of a graph on the queries of a run, and the search effort that reaches it.

A graph (Malkov and Yashunin, IEEE TPAMI 2020, https://arxiv.org/abs/1603.09320) finds the nearest rows only approximately,
and how well depends on the vectors: near-duplicates and dense clusters are found worst. So a run compares a sample of the
queries with exact search, and doubles ``ef``, the candidates that a search holds, until the recall is reached. Where
exact search would be cheaper than the next ``ef``, it replaces the graph. No clock is read: a repeated run decides the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedlight.datamodules.vectors.vector_index import Hits, VectorIndex, exact_search
from fedlight.support.seeding import derive_seed

SAMPLE = 200  # queries compared with exact search; among a million rows of 384 numbers this takes about ten seconds
ROWS_PER_CANDIDATE = 200
"""Rows whose exact scores cost as much as one candidate of a graph search, by the speeds in docs/results/feddca.md.

Exact scores are a product of matrices, while a candidate's 16 to 32 neighbours are read from all over the memory.
"""
SAME_SCORE = 1e-6  # exact and graph search round a cosine differently


@dataclass(frozen=True)
class SearchRecall:
    """Measured recall of a graph, and what searches in its place if exact search is cheaper; ``str`` gives one line.

    Attributes:
        rows: number of rows of the index.
        dimension: length of a vector.
        number: k, rows asked for by a query.
        queries: number of queries compared with exact search.
        all_queries: number of queries of the run.
        target: wanted mean recall.
        efforts: ``ef`` of each search that was tried, for k rows; each is twice the one before.
        means: mean recall@k over the queries with each ``ef``, in [0, 1].
        worsts: recall@k of the worst query with each ``ef``, in [0, 1].
        exact: whether the queries are searched exactly, as ``target`` was not reached while the graph was cheaper.

    Examples:
        >>> print(SearchRecall(100_000, 384, 50, 200, 320, 0.99, (200, 400), (0.95, 0.9941), (0.5, 0.88), False))
        index of 100,000 x 384: hnsw, ef 400 for 50 rows, recall 0.9941, worst query 0.8800 (200 of 320 queries compared)
    """

    rows: int
    dimension: int
    number: int
    queries: int
    all_queries: int
    target: float
    efforts: tuple[int, ...]
    means: tuple[float, ...]
    worsts: tuple[float, ...]
    exact: bool

    def __str__(self) -> str:
        summary = (
            f"hnsw, ef {self.efforts[-1]:,} for {self.number:,} rows, recall {self.means[-1]:.4f}, worst query "
            f"{self.worsts[-1]:.4f} ({self.queries:,} of {self.all_queries:,} queries compared)"
        )
        if self.exact:
            summary += (
                f", below {self.target}; searched exactly, which is cheaper than ef {2 * self.efforts[-1]:,}"
            )
        return f"index of {self.rows:,} x {self.dimension:,}: {summary}"

    def record(self) -> dict[str, Any]:
        """Return plain values for a record."""
        plain = {name: getattr(self, name) for name in ("rows", "dimension", "number", "queries", "target")}
        each = zip(self.efforts, self.means, self.worsts, strict=True)
        tried = [dict(zip(("ef", "recall", "worst_query"), values, strict=True)) for values in each]
        return {**plain, "searched": "exact" if self.exact else "hnsw", "tried": tried}


def query_recall(approximate: Sequence[Hits], exact: Sequence[Hits]) -> np.ndarray:
    """Return each query's share of exact hits that were found, ``(queries,)``, in [0, 1]; 1 where there are none.

    A row that is as near as the last exact hit counts as found: of equal rows any is right.

    Examples:
        >>> rows, scores = np.array([3, 8]), np.array([0.9, 0.5], dtype=np.float32)
        >>> query_recall([Hits(np.array([3, 4]), np.array([0.9, 0.4], dtype=np.float32))], [Hits(rows, scores)])
        array([0.5])
    """
    shares = [
        min(1.0, np.count_nonzero(hits.scores >= right.scores[-1] - SAME_SCORE) / len(right.rows))
        if len(right.rows)
        else 1.0
        for hits, right in zip(approximate, exact, strict=True)
    ]
    return np.array(shares)


def reach_recall(
    index: VectorIndex, queries: np.ndarray, number: int, below: float | None, target: float, seed: int
) -> SearchRecall:
    """Raise ``ef`` of a graph until the recall of the queries is reached; return the measurements.

    Args:
        index: index of kind ``hnsw``; its ``ef_factor`` is set to the last one tried.
        queries: all queries of the run, ``(queries, dimension)``, at least one; at most 200 of them are compared.
        number: rows asked for by a query, >= 1.
        below: bound of the cosine, see `VectorIndex.search`.
        target: mean recall in [0, 1]; 0 measures alone.
        seed: seed of the sample.

    Raises:
        ValueError: the index is exact, or see `VectorIndex.search`.
    """
    if index.kind == "exact":
        raise ValueError("an exact index has a recall of 1: there is nothing to measure")
    rng = np.random.default_rng(derive_seed(seed, "recall of the index"))
    sample = np.asarray(queries)[np.sort(rng.permutation(len(queries))[:SAMPLE])]
    exact = exact_search(index.vectors, index.unit_queries(sample), number, below)
    efforts, means, worsts = [], [], []
    index.ef_factor = 1
    while True:
        recall = query_recall(index.search(sample, number, below), exact)
        efforts.append(index.ef(number))
        means.append(float(recall.mean()))
        worsts.append(float(recall.min()))
        reached = means[-1] >= target  # always at target 0, which measures alone
        # The next effort would cost as much as exact search.
        if reached or 2 * efforts[-1] * ROWS_PER_CANDIDATE >= len(index):
            break
        index.ef_factor *= 2
    return SearchRecall(
        rows=len(index),
        dimension=index.dimension,
        number=number,
        queries=len(sample),
        all_queries=len(queries),
        target=target,
        efforts=tuple(efforts),
        means=tuple(means),
        worsts=tuple(worsts),
        exact=not reached,
    )
