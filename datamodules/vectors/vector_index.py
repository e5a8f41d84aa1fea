"""Nearest unit vectors by cosine: exact, or by a navigable small-world graph (hnswlib).

Malkov and Yashunin, "Efficient and Robust Approximate Nearest Neighbor Search Using Hierarchical Navigable Small World
Graphs", IEEE TPAMI 2020, https://arxiv.org/abs/1603.09320. FedDCA (https://arxiv.org/abs/2409.20135) searches public
instructions below a similarity alpha. A graph search has no such bound, so it is repeated with more neighbours, as many as
were above alpha. If that is a quarter of all rows or more, the query is searched exactly. The graph only proposes rows:
scores are dot products with the stored vectors.

A graph finds the nearest rows only approximately, and how well depends on the vectors: near-duplicates and dense clusters
are found worst. So a run compares a sample of the queries with exact search, and doubles ``ef``, the candidates that a
search holds, until the recall is reached. Where exact search would be cheaper than the next ``ef``, it replaces the graph.
No clock is read: a repeated run decides the same.
"""

import warnings
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from fedlight.support.seeding import derive_seed

Kind = Literal["auto", "exact", "hnsw"]
EXACT_BELOW = 50_000
LINKS, BUILD_EFFORT = 16, 200  # hnswlib's M and ef_construction, its own defaults
SEARCH_EFFORT = 4  # candidates held while searching, for each neighbour asked for
MIN_EFFORT = 200
ROWS_AT_ONCE, QUERIES_AT_ONCE = 16_384, 256  # rows are scored, checked and added block by block
SAMPLE = 200  # queries compared with exact search; among a million rows of 384 numbers this takes about ten seconds
ROWS_PER_CANDIDATE = 200
"""Rows whose exact scores cost as much as one candidate of a graph search, by the speeds in docs/results/feddca.md.

Exact scores are a product of matrices, while a candidate's 16 to 32 neighbours are read from all over the memory.
"""
SAME_SCORE = 1e-6  # exact and graph search round a cosine differently


class Hits(NamedTuple):
    """Rows found for one query, best first, no row twice; equal scores in the order of their rows."""

    rows: np.ndarray  # positions in the index, ``(hits,)`` int64
    scores: np.ndarray  # cosines, ``(hits,)`` float32


class VectorIndex:
    """Searchable unit vectors; create one by `build`.

    Attributes:
        kind: ``"exact"`` or ``"hnsw"``.
        vectors: ``(rows, dimension)`` float32, unit length.
        ef_factor: factor on the candidates that a graph search holds, >= 1; more give better recall and search longer.
            `reach_recall` finds it.
    """

    ef_factor: int = 1

    def __init__(self, vectors: np.ndarray, graph: Any | None) -> None:
        self.kind = "exact" if graph is None else "hnsw"
        self.vectors, self._graph = vectors, graph

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.vectors)

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        return int(self.vectors.shape[1])

    def ef(self, asked: int) -> int:
        """Return the number of candidates that a graph search for ``asked`` rows holds (hnswlib's ef)."""
        return self.ef_factor * max(SEARCH_EFFORT * asked, MIN_EFFORT)

    def exact(self) -> "VectorIndex":
        """Return an exact index of the same vectors, which are not copied."""
        return VectorIndex(self.vectors, None)

    @classmethod
    def build(cls, vectors: np.ndarray, kind: Kind = "auto") -> Self:
        """Return an index of the vectors, which are not copied; a graph holds its own copy.

        Args:
            vectors: ``(rows, dimension)``, unit length.
            kind: ``"auto"`` is exact below 50,000 rows or without hnswlib, else ``"hnsw"``, the graph.

        Raises:
            ValueError: there are no rows, the vectors are no matrix or not of unit length, or hnswlib is missing.

        Examples:
            >>> index = VectorIndex.build(np.eye(3, dtype=np.float32))
            >>> index.kind, len(index), index.dimension
            ('exact', 3, 3)
        """
        vectors = _check_vectors(vectors)
        graph = None
        if _choose_kind(kind, len(vectors)) == "hnsw":
            graph = _create_graph(vectors.shape[1])
            graph.init_index(max_elements=len(vectors), M=LINKS, ef_construction=BUILD_EFFORT, random_seed=0)
            for start in range(0, len(vectors), ROWS_AT_ONCE):
                block = np.asarray(vectors[start : start + ROWS_AT_ONCE])
                # Only one thread builds the same graph each time.
                graph.add_items(block, np.arange(start, start + len(block)), num_threads=1)
        return cls(vectors, graph)

    def search(self, queries: np.ndarray, number: int, below: float | None = None) -> list[Hits]:
        """Return the ``number`` rows most similar to each query, among rows with a cosine below ``below``.

        Args:
            queries: ``(queries, dimension)``, of any length but 0.
            number: hits per query, >= 1; fewer if the index has fewer.
            below: rows with this cosine or more are skipped; None skips none.

        Returns:
            Hits of each query, best first.

        Raises:
            ValueError: ``number`` < 1, queries of another dimension, or a query of length 0.
        """
        queries = self.unit_queries(queries)
        if number < 1:
            raise ValueError(f"number={number}: ask for at least 1 row")
        results: dict[int, Hits] = {}
        asked, waiting = number, np.arange(len(queries))  # queries without enough rows yet
        # From a quarter of the rows on, exact search takes over.
        while self._graph is not None and len(waiting) and asked * 4 <= len(self):
            proposed = self._propose(queries[waiting], asked)
            if proposed is None:
                break
            above = 0
            for query, rows in zip(waiting.tolist(), proposed, strict=True):
                rows = np.sort(rows)
                scores = np.asarray(self.vectors[rows]) @ queries[query]
                under = np.flatnonzero(scores < (np.inf if below is None else below))
                if len(under) >= number:
                    results[query] = _take_best(rows[under], scores[under], number)
                else:
                    above = max(above, asked - len(under))
            waiting = np.array([query for query in waiting.tolist() if query not in results], dtype=int)
            # Rows above the bound are the nearest, so all of them are known once one row below it is proposed.
            asked = number + above if above < asked else 2 * asked
        exact = exact_search(self.vectors, queries[waiting], number, below)
        results |= dict(zip(waiting.tolist(), exact, strict=True))
        return [results[query] for query in range(len(queries))]

    def _propose(self, queries: np.ndarray, asked: int) -> np.ndarray | None:
        """Return rows near each query, ``(queries, asked)``; None if the graph has too few links to reach so many."""
        assert self._graph is not None
        self._graph.set_ef(self.ef(asked))
        try:
            rows: np.ndarray = self._graph.knn_query(queries, k=asked, num_threads=1)[0]
        except RuntimeError:  # hnswlib: too few links to reach so many
            return None
        return rows.astype(np.int64)

    def unit_queries(self, queries: np.ndarray) -> np.ndarray:
        """Return queries ``(queries, dimension)`` as float32 of unit length; raises ValueError like `search`."""
        queries = np.asarray(queries, dtype=np.float32)
        if queries.ndim != 2 or queries.shape[1] != self.dimension:
            raise ValueError(
                f"queries of shape {queries.shape} do not fit an index of {self.dimension} dimensions: encode both with "
                "the same encoder, or project the queries first (FedDCAStar)"
            )
        lengths = np.linalg.norm(queries, axis=1, keepdims=True)  # [queries, 1]
        if not (np.isfinite(lengths).all() and lengths.all()):
            raise ValueError("a query has length 0 or is not finite: it has no direction to search in")
        return np.asarray(queries / lengths, dtype=np.float32)


def _choose_kind(kind: Kind, rows: int) -> str:
    if kind != "auto":
        return kind
    if rows < EXACT_BELOW:
        return "exact"
    if find_spec("hnswlib") is None:
        warnings.warn(
            f"{rows:,} rows are searched exactly, as hnswlib is not installed: pip install 'fedlight[hnsw]', or set the "
            "index's kind to exact",
            stacklevel=3,
        )
        return "exact"
    return "hnsw"


def _check_vectors(vectors: np.ndarray) -> np.ndarray:
    """Return the vectors as float32; raise ValueError unless they are a matrix of unit vectors."""
    vectors = np.asarray(vectors, dtype=np.float32)
    if vectors.ndim != 2 or not len(vectors):
        raise ValueError(
            f"an index needs vectors of shape (rows, dimension) and at least one row, not {vectors.shape}"
        )
    for start in range(0, len(vectors), ROWS_AT_ONCE):
        lengths = np.linalg.norm(vectors[start : start + ROWS_AT_ONCE], axis=1)
        wrong = np.flatnonzero(~(np.abs(lengths - 1) < 1e-3))
        if len(wrong):
            raise ValueError(
                f"vector {start + wrong[0]} has length {lengths[wrong[0]]:.4g}: divide vectors by their length first"
            )
    return vectors


def _create_graph(dimension: int) -> Any:
    if find_spec("hnswlib") is None:
        raise ValueError(
            "an index of kind hnsw needs hnswlib: pip install 'fedlight[hnsw]' (needs a C++ compiler), or choose kind exact"
        )
    import hnswlib

    return hnswlib.Index(space="cosine", dim=dimension)


def exact_search(
    vectors: np.ndarray, queries: np.ndarray, number: int, below: float | None = None
) -> list[Hits]:
    """Return the same hits as `VectorIndex.search`, from a comparison with every row.

    Vectors ``(rows, dimension)`` and queries ``(queries, dimension)`` are float32 of unit length. At most
    ``QUERIES_AT_ONCE x (ROWS_AT_ONCE + number)`` scores are held at once, so memory does not grow with the rows.

    Examples:
        >>> hits = exact_search(np.eye(3, dtype=np.float32), np.array([[0.6, 0.8, 0.0]], dtype=np.float32), 2)
        >>> hits[0].rows.tolist()
        [1, 0]
    """
    results = []
    for start in range(0, len(queries), QUERIES_AT_ONCE):
        some = queries[start : start + QUERIES_AT_ONCE]
        best = [Hits(np.empty(0, np.int64), np.empty(0, np.float32))] * len(some)
        for first in range(0, len(vectors), ROWS_AT_ONCE):
            scores = some @ np.asarray(vectors[first : first + ROWS_AT_ONCE]).T  # [queries, rows]
            best = [_merge(hits, new, first, number, below) for hits, new in zip(best, scores, strict=True)]
        results += best
    return results


def _take_best(rows: np.ndarray, scores: np.ndarray, number: int) -> Hits:
    if len(scores) > number:
        worst = np.partition(scores, len(scores) - number)[len(scores) - number]
        candidates = np.flatnonzero(scores >= worst)  # slightly more than number if scores are equal
        rows, scores = rows[candidates], scores[candidates]
    order = np.lexsort((rows, -scores))[:number]
    return Hits(rows[order].astype(np.int64), scores[order].astype(np.float32))


def _merge(hits: Hits, scores: np.ndarray, first: int, number: int, below: float | None) -> Hits:
    """Return the best of earlier hits and of the block that begins at row ``first``."""
    keep = np.full(len(scores), True) if below is None else scores < below
    if len(hits.scores) == number:
        keep &= scores > hits.scores[-1]  # later rows lose against equal earlier ones
    rows = np.flatnonzero(keep)
    if not len(rows):
        return hits
    return _take_best(
        np.concatenate([hits.rows, rows + first]), np.concatenate([hits.scores, scores[rows]]), number
    )


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
