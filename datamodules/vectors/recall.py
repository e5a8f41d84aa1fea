"""Recall of a graph on the queries of a run, and the search effort that reaches it.

A graph (Malkov and Yashunin, IEEE TPAMI 2020, https://arxiv.org/abs/1603.09320) finds the nearest rows only approximately,
and how well depends on the vectors: near-duplicates and dense clusters are found worst. So a run compares a sample of the
queries with exact search, and doubles ``ef``, the candidates that a search holds, until the recall is reached. Where
exact search would be cheaper than the next ``ef``, it replaces the graph. No clock is read: a repeated run decides the same.
"""

from collections.abc import Mapping, Sequence
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
) -> dict[str, Any]:
    """Raise ``ef_factor`` of a graph until the mean recall of the queries reaches the target; return the measurements.

    Of all queries of the run, ``(queries, dimension)``, at least one, at most 200 are compared, drawn by the seed. A query
    asks for ``number`` rows with a cosine below ``below``. A target of 0 measures alone.

    Returns:
        ``rows`` and ``dimension`` of the index, ``number``, ``queries`` that were compared, ``target``; ``searched``:
        ``exact`` where the target was not reached while the graph was cheaper, else ``hnsw``; ``tried``: for each search
        ``ef``, twice that of the one before, and mean ``recall`` and that of the ``worst_query``, in [0, 1].

    Raises:
        ValueError: the index is exact, or see `VectorIndex.search`.
    """
    if index.kind == "exact":
        raise ValueError("an exact index has a recall of 1: there is nothing to measure")
    rng = np.random.default_rng(derive_seed(seed, "recall of the index"))
    sample = np.asarray(queries)[np.sort(rng.permutation(len(queries))[:SAMPLE])]
    exact = exact_search(index.vectors, index.unit_queries(sample), number, below)
    tried: list[dict[str, Any]] = []
    index.ef_factor = 1
    while True:
        recall, ef = query_recall(index.search(sample, number, below), exact), index.ef(number)
        tried.append({"ef": ef, "recall": float(recall.mean()), "worst_query": float(recall.min())})
        reached = tried[-1]["recall"] >= target  # always at target 0, which measures alone
        # The next effort would cost as much as exact search.
        if reached or 2 * ef * ROWS_PER_CANDIDATE >= len(index):
            break
        index.ef_factor *= 2
    about = {"rows": len(index), "dimension": index.dimension, "number": number, "queries": len(sample)}
    return {**about, "target": target, "searched": "hnsw" if reached else "exact", "tried": tried}


def in_words(measured: Mapping[str, Any], all_queries: int) -> str:
    """Return the measurements of `reach_recall` in one line.

    Examples:
        >>> tried = [{"ef": 400, "recall": 0.9941, "worst_query": 0.88}]
        >>> about = {"rows": 100_000, "dimension": 384, "number": 50, "queries": 200, "target": 0.99}
        >>> print(in_words({**about, "searched": "hnsw", "tried": tried}, 320))
        index of 100,000 x 384: hnsw, ef 400 for 50 rows, recall 0.9941, worst query 0.8800 (200 of 320 queries compared)
    """
    last = measured["tried"][-1]
    line = (
        f"index of {measured['rows']:,} x {measured['dimension']:,}: hnsw, ef {last['ef']:,} for {measured['number']:,} "
        f"rows, recall {last['recall']:.4f}, worst query {last['worst_query']:.4f} ({measured['queries']:,} of "
        f"{all_queries:,} queries compared)"
    )
    if measured["searched"] == "exact":
        line += f", below {measured['target']}; searched exactly, which is cheaper than ef {2 * last['ef']:,}"
    return line
