"""FedDCA: the server picks one centre of each client so that together they cover the domain, and retrieves around these.

Wang et al., "Federated Instruction Tuning of LLMs with Domain Coverage Augmentation", https://arxiv.org/abs/2409.20135,
Algorithm 1. Clients encode and cluster their instructions and send centres and sizes. The server selects a centre of each
client greedily. Each client then gets the top N_p public instructions whose cosine to that centre is below alpha, so that
rows that overlap with private data are left out. Where fewer rows lie below alpha a client gets fewer, which is reported.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from fedlight.augmentation import retrieval
from fedlight.datamodules.instructions.augmentation import Added
from fedlight.datamodules.vectors.clusters import Clusters
from fedlight.datamodules.vectors.encoders import Encoder
from fedlight.datamodules.vectors.retrieval import retrieve
from fedlight.datamodules.vectors.selection import Selection, select_centers
from fedlight.support.types import Fields


class FedDCA(retrieval.Retrieval):
    """Greedy selection of client centres and retrieval around them, scored by the cosine to the client's selected centre.

    Args:
        encoder: encoder of the clients and of the server.
        number: N_p, rows for each client, >= 1.
        clusters: xi, centres that a client sends, >= 1; fewer where it has fewer distinct instructions.
        alpha: upper bound of a row's cosine to the client's centre, in (-1, 1]; None: no bound.
        index: ``exact``, ``hnsw``, or ``auto``: exact below 50,000 rows.
        selection: for the i-th further of N clients ``drop_i`` leaves out the i centres most similar to those selected, as
            the paper's text says; ``keep_n_minus_i`` keeps only the N - i least similar, as printed in its Algorithm 1. With
            ``clusters`` = N both are the same; see `fedlight.datamodules.vectors.selection`.
        index_recall: mean recall in [0, 1] that an index of kind hnsw has to reach on the run's own queries: its ``ef`` is
            doubled until then, or the queries are searched exactly where that is cheaper. 0 measures alone. The recall is
            printed and recorded.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        encoder: Encoder,
        number: int,
        clusters: int = 10,
        alpha: float | None = 0.7,
        index: retrieval.IndexKind = "auto",
        selection: Selection = "drop_i",
        index_recall: float = 0.99,
    ) -> None:
        super().__init__(encoder, number, clusters, alpha, index, index_recall)
        self.selection, self.server_encoder = selection, encoder  # FedDCA* has another one

    def augment(
        self, clients: Mapping[str, Sequence[Fields]], public: Sequence[Fields], seed: int
    ) -> dict[str, list[Added]]:
        sent = retrieval.compute_centers(self.encoder, clients, self.clusters, seed)  # lines 1 to 4
        projected = self._projected(sent)
        index = retrieval.build_index(self.server_encoder, public, self.index)
        chosen = select_centers(projected, seed, self.selection)
        centers = {client: clusters.centers[chosen[client]] for client, clusters in projected.items()}
        messages = {
            client: {
                "sent_bytes": retrieval.count_bytes(clusters),
                "sizes": clusters.sizes.tolist(),
                "chosen": chosen[client],
            }
            for client, clusters in sent.items()
        }
        self._notes = {"clients": messages}
        index = self.tuned(index, np.stack([*centers.values()]), seed)
        hits = retrieve(index, centers, self.number, self.alpha)
        return {client: retrieval.to_added(hits[client], public) for client in centers}

    def _projected(self, sent: dict[str, Clusters]) -> dict[str, Clusters]:
        """Return the clusters with centres in the space of the server's encoder."""
        return sent
