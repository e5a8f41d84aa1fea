"""Nearest unit vectors by cosine: exact, or by a navigable small-world graph (hnswlib).

Malkov and Yashunin, "Efficient and Robust Approximate Nearest Neighbor Search Using Hierarchical Navigable Small World
Graphs", IEEE TPAMI 2020, https://arxiv.org/abs/1603.09320. FedDCA (https://arxiv.org/abs/2409.20135) searches public
instructions only below a similarity alpha. A graph knows no such bound: it is asked again for more neighbours, as many as
were above it; where that would be a quarter of all rows or more, the query is searched exactly. Scores of either kind are
dot products with the stored vectors: the graph only proposes rows.
"""

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from fedlight.datamodules.vectors.exact_search import Hits, best_first, exact_search
from fedlight.datamodules.vectors.index_files import (
    graph_file,
    has_index,
    read_about,
    read_vectors,
    vectors_digest,
    write_index,
)

__all__ = ["Hits", "Kind", "VectorIndex"]

Kind = Literal["auto", "exact", "hnsw"]
EXACT_BELOW = 50_000
LINKS, BUILD_EFFORT = 16, 200  # hnswlib's M and ef_construction, its own defaults
SEARCH_EFFORT = 4  # candidates held while searching, for each neighbour asked for
MIN_EFFORT = 200
ADDED_AT_ONCE = 16_384


class VectorIndex:
    """Unit vectors that can be searched; made by :meth:`build`, :meth:`load` or :meth:`open`.

    Attributes:
        kind: ``"exact"`` or ``"hnsw"``.
        vectors: ``(rows, dimension)`` float32, unit length; of a loaded index a read-only memory map.
        digest: of the vectors, by :func:`~fedlight.datamodules.vectors.index_files.vectors_digest`.
    """

    def __init__(self, vectors: np.ndarray, graph: Any | None, digest: str) -> None:
        self.kind = "exact" if graph is None else "hnsw"
        self.vectors = vectors
        self.digest = digest
        self._graph = graph

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.vectors)

    @property
    def dimension(self) -> int:
        """Numbers in a vector."""
        return int(self.vectors.shape[1])

    @classmethod
    def build(
        cls,
        vectors: np.ndarray,
        kind: Kind = "auto",
        links: int = LINKS,
        build_effort: int = BUILD_EFFORT,
        threads: int = 1,
    ) -> Self:
        """Indexes vectors, which are kept, not copied; a graph holds a copy of its own.

        Args:
            vectors: ``(rows, dimension)``, unit length.
            kind: ``"auto"`` is exact below 50,000 rows or without hnswlib, else ``"hnsw"``, the graph.
            links: of a node to others (hnswlib's M), >= 2; more find more and take more memory.
            build_effort: candidates held while building (ef_construction), >= 1; more find more and build longer.
            threads: that build the graph. Only one builds the same graph each time: with more, a later search may find
                slightly different rows.

        Raises:
            ValueError: no rows, not a matrix, vectors that are not of unit length, or hnswlib is missing.

        Example:
            >>> index = VectorIndex.build(np.eye(3, dtype=np.float32))
            >>> index.kind, len(index), index.dimension
            ('exact', 3, 3)
        """
        vectors = _checked(vectors)
        graph = None
        if _chosen(kind, len(vectors)) == "hnsw":
            graph = _new_graph(vectors.shape[1])
            graph.init_index(max_elements=len(vectors), M=links, ef_construction=build_effort, random_seed=0)
            for start in range(0, len(vectors), ADDED_AT_ONCE):
                block = np.asarray(vectors[start : start + ADDED_AT_ONCE])
                graph.add_items(block, np.arange(start, start + len(block)), num_threads=threads)
        return cls(vectors, graph, vectors_digest(vectors))

    @classmethod
    def open(cls, folder: str | Path, vectors: np.ndarray, kind: Kind = "auto", threads: int = 1) -> Self:
        """The index of these vectors that lies in a folder; built and saved there where it does not.

        Args:
            folder: of :meth:`save`; an index of other vectors or of another kind in it is replaced.
            vectors: see :meth:`build`, as for the others.
            kind: see :meth:`build`.
            threads: see :meth:`build`.

        Raises:
            ValueError: see :meth:`build`; or what lies there is damaged.
            OSError: the folder cannot be written.
        """
        folder = Path(folder)
        if has_index(folder):
            about = read_about(folder)
            vectors = _checked(vectors)
            same = about["kind"] == _chosen(kind, len(vectors)) and about["digest"] == vectors_digest(vectors)
            if same:
                return cls.load(folder)
        index = cls.build(vectors, kind, threads=threads)
        index.save(folder)
        return index

    def save(self, folder: str | Path) -> None:
        """Writes the index; :meth:`load` reads it.

        Raises:
            OSError: the folder cannot be written.
        """
        about = {
            "kind": self.kind,
            "rows": len(self),
            "dimension": self.dimension,
            "digest": self.digest,
        }
        write_index(Path(folder), self.vectors, about, None if self._graph is None else self._save_graph)

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Opens a saved index, the vectors memory-mapped.

        Raises:
            FileNotFoundError: there is none.
            ValueError: a file of it is damaged or belongs to another index, or hnswlib is missing.
        """
        about = read_about(Path(folder))
        vectors, graph = read_vectors(Path(folder), about), None
        if about["kind"] == "hnsw":
            graph = _new_graph(about["dimension"])
            graph.load_index(str(graph_file(Path(folder), about)))
        return cls(vectors, graph, about["digest"])

    def search(
        self, queries: np.ndarray, number: int, below: float | None = None, threads: int = 1
    ) -> list[Hits]:
        """The ``number`` rows most similar to each query, of those below ``below``.

        Args:
            queries: ``(queries, dimension)``, of any length but 0.
            number: hits per query, >= 1; fewer where there are fewer.
            below: rows with this cosine or more are passed over; None passes over none.
            threads: that search a graph, each a query of its own; the hits do not depend on it.

        Returns:
            For each query its hits, best first.

        Raises:
            ValueError: ``number`` < 1, queries of another dimension, or a query of length 0.
        """
        queries = self._unit_queries(queries)
        if number < 1:
            raise ValueError(f"number={number}: ask for at least 1 row")
        found: dict[int, Hits] = {}
        asked, waiting = number, np.arange(len(queries))
        while self._graph is not None and len(waiting) and asked * 4 <= len(self):
            proposed = self._propose(queries[waiting], asked, threads)
            if proposed is None:
                break
            above = 0
            for query, rows in zip(waiting.tolist(), proposed, strict=True):
                rows = np.sort(rows)
                scores = np.asarray(self.vectors[rows]) @ queries[query]
                under = np.flatnonzero(scores < (np.inf if below is None else below))
                if len(under) >= number:
                    found[query] = best_first(rows[under], scores[under], number)
                else:
                    above = max(above, asked - len(under))
            waiting = np.array([query for query in waiting.tolist() if query not in found], dtype=int)
            # Who is above the bound is nearest, so all of them are seen as soon as one below is.
            asked = number + above if above < asked else 2 * asked
        exact = exact_search(self.vectors, queries[waiting], number, below)
        found |= dict(zip(waiting.tolist(), exact, strict=True))
        return [found[query] for query in range(len(queries))]

    def _propose(self, queries: np.ndarray, asked: int, threads: int) -> np.ndarray | None:
        """Rows near each query, ``(queries, asked)``; None where the graph's parts are too badly linked for so many."""
        assert self._graph is not None
        self._graph.set_ef(max(SEARCH_EFFORT * asked, MIN_EFFORT))
        try:
            rows: np.ndarray = self._graph.knn_query(queries, k=asked, num_threads=threads)[0]
        except RuntimeError:
            return None
        return rows.astype(np.int64)

    def _save_graph(self, file: str) -> int:
        assert self._graph is not None
        self._graph.save_index(file)
        return int(self._graph.index_file_size())

    def _unit_queries(self, queries: np.ndarray) -> np.ndarray:
        queries = np.asarray(queries, dtype=np.float32)
        if queries.ndim != 2 or queries.shape[1] != self.dimension:
            raise ValueError(
                f"queries of shape {queries.shape} do not fit an index of {self.dimension} dimensions: encode both with "
                "the same encoder, or project the queries first (FedDCAStar)"
            )
        lengths = np.linalg.norm(queries, axis=1, keepdims=True)
        if not (np.isfinite(lengths).all() and lengths.all()):
            raise ValueError("a query has length 0 or is not finite: it has no direction to search in")
        return np.asarray(queries / lengths, dtype=np.float32)


def _chosen(kind: Kind, rows: int) -> str:
    if kind != "auto":
        return kind
    if rows < EXACT_BELOW:
        return "exact"
    if find_spec("hnswlib") is None:
        warnings.warn(
            f"{rows:,} rows are searched exactly, as hnswlib is not installed: pip install 'fedlight[hnsw]', or set the "
            "kind of index to exact",
            stacklevel=3,
        )
        return "exact"
    return "hnsw"


def _checked(vectors: np.ndarray) -> np.ndarray:
    vectors = np.asarray(vectors, dtype=np.float32)
    if vectors.ndim != 2 or not len(vectors):
        raise ValueError(
            f"an index needs vectors of shape (rows, dimension) and at least one row, not {vectors.shape}"
        )
    for start in range(0, len(vectors), ADDED_AT_ONCE):
        lengths = np.linalg.norm(vectors[start : start + ADDED_AT_ONCE], axis=1)
        wrong = np.flatnonzero(~(np.abs(lengths - 1) < 1e-3))
        if len(wrong):
            raise ValueError(
                f"vector {start + wrong[0]} has length {lengths[wrong[0]]:.4g}: divide vectors by their length first"
            )
    return vectors


def _new_graph(dimension: int) -> Any:
    if find_spec("hnswlib") is None:
        raise ValueError(
            "an index of kind hnsw needs hnswlib: pip install 'fedlight[hnsw]' (compiled with a C++ compiler), or choose "
            "kind exact"
        )
    import hnswlib

    return hnswlib.Index(space="cosine", dim=dimension)
