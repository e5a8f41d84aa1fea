"""Retrieval of public rows: the clients' messages, and the server's index of its public instructions.

Wang et al., "Federated Instruction Tuning of LLMs with Domain Coverage Augmentation" (FedDCA),
https://arxiv.org/abs/2409.20135, Algorithm 1. A client sends the centres and sizes of clusters of its instructions, and
nothing else (lines 1 to 4).
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from lightning.pytorch.utilities import rank_zero_info

from fedlight.datamodules.instructions.augmentation import Added, Augmentation
from fedlight.datamodules.rows.fields import instruction_text
from fedlight.datamodules.vectors.clusters import Clusters, cluster
from fedlight.datamodules.vectors.encoders import Encoder
from fedlight.datamodules.vectors.vector_index import Hits, VectorIndex, in_words, reach_recall
from fedlight.processes.work import once
from fedlight.support.checks import check_range, refuse_below
from fedlight.support.console import progress_bar
from fedlight.support.seeding import derive_seed
from fedlight.support.types import Fields

IndexKind = Literal["auto", "exact", "hnsw"]


class Retrieval(Augmentation):
    """Base class of augmentations that retrieve public rows around the centres of clients' clusters; see `FedDCA`."""

    def __init__(
        self,
        encoder: Encoder,
        number: int,
        clusters: int = 10,
        alpha: float | None = None,
        index: IndexKind = "auto",
        index_recall: float = 0.99,
    ) -> None:
        super().__init__(number)
        refuse_below(1, clusters=clusters)
        if alpha is not None:
            check_range("alpha", alpha, -1, 1, above_low=True)
        check_range("index_recall", index_recall, 0, 1)
        self.encoder, self.clusters, self.alpha = encoder, clusters, alpha
        self.index, self.index_recall = index, index_recall
        self._notes: dict[str, object] = {}

    def tuned(self, index: VectorIndex, queries: np.ndarray, seed: int) -> VectorIndex:
        """Return an index with the wanted recall on all ``queries``, ``(queries, dimension)``; a graph's recall is recorded.

        It is measured, and printed, by `reach_recall`.
        """
        if index.kind == "exact":
            return index
        # One process measures for all, so that each searches with the same effort.
        measured = once(
            lambda: reach_recall(index, queries, self.number, self.alpha, self.index_recall, seed)
        )
        rank_zero_info(in_words(measured, len(queries)))
        self._notes["index"] = measured
        index.ef_factor = 2 ** (len(measured["tried"]) - 1)  # doubled for each effort after the first
        return index.exact() if measured["searched"] == "exact" else index

    def why_fewer(self) -> str:
        return "no more rows" if self.alpha is None else f"no more rows lie below alpha={self.alpha}"

    def record(self) -> dict[str, object]:
        """Return the bytes that each client sent, the choice among its clusters, and a graph's recall."""
        return self._notes


def compute_centers(
    encoder: Encoder, clients: Mapping[str, Sequence[Fields]], num_clusters: int, seed: int
) -> dict[str, Clusters]:
    """Return each client's message: at most ``num_clusters`` (xi) centres, fewer with fewer distinct instructions."""
    # One call for all clients: rows are encoded independently.
    vectors = encoder.encode([instruction_text(row) for rows in clients.values() for row in rows])
    ends = np.cumsum([len(rows) for rows in clients.values()])
    clusters = {}
    with progress_bar("Clustering clients", len(clients)) as advance:
        for client, points in zip(clients, np.split(vectors, ends[:-1]), strict=True):
            clusters[client] = cluster(points, num_clusters, derive_seed(seed, "centres", client))
            advance(1)
    return clusters


def count_bytes(clusters: Clusters) -> int:
    """Return the bytes of a client's message: centres in fp32, sizes as 64-bit numbers.

    Examples:
        >>> count_bytes(Clusters(np.zeros((10, 384), np.float32), np.zeros(10, np.int64)))
        15440
    """
    return int(clusters.centers.nbytes + clusters.sizes.nbytes)


def build_index(encoder: Encoder, public: Sequence[Fields], kind: IndexKind) -> VectorIndex:
    """Return an index of the public instructions; release the encoder's model."""
    vectors = encoder.encode([instruction_text(row) for row in public])
    encoder.release()  # before the language model is loaded
    return VectorIndex.build(vectors, kind)


def to_added(hits: Hits, public: Sequence[Fields]) -> list[Added]:
    """Return the retrieved rows with their texts.

    Examples:
        >>> to_added(Hits(np.array([1]), np.array([0.5])), [{"response": "a"}, {"response": "b"}])
        [Added(fields={'response': 'b'}, row=1, score=0.5)]
    """
    return [
        Added(public[row], row, score)
        for row, score in zip(hits.rows.tolist(), hits.scores.tolist(), strict=True)
    ]
