"""Direct retrieval: the nearest public rows of each of a client's centres, independent of the other clients.

Wang et al., "Federated Instruction Tuning of LLMs with Domain Coverage Augmentation" (FedDCA),
https://arxiv.org/abs/2409.20135, appendix A.3, Algorithm 2: the top N_p / xi of every local centre, without repeats.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from fedlight.augmentation import retrieval
from fedlight.datamodules.instructions.augmentation import Added
from fedlight.datamodules.vectors.retrieval import retrieve_direct
from fedlight.support.types import Fields


class DirectRetrieval(retrieval.Retrieval):
    """Retrieval of the nearest public rows of all of a client's centres, scored by the cosine to their centre.

    Args:
        encoder: encoder of the clients and of the server.
        number: rows for each client, >= 1.
        clusters: centres of each client, >= 1.
        alpha: upper bound of a row's cosine to its centre, in (-1, 1]; None, as in the paper: no bound.
        index: ``exact``, ``hnsw``, or ``auto``: exact below 50,000 rows.
        index_recall: see `FedDCA`.

    Raises:
        ValueError: a setting is out of range.
    """

    def augment(
        self, clients: Mapping[str, Sequence[Fields]], public: Sequence[Fields], seed: int
    ) -> dict[str, list[Added]]:
        sent = retrieval.compute_centers(self.encoder, clients, self.clusters, seed)
        index = retrieval.build_index(self.encoder, public, self.index)
        queries = np.concatenate([clusters.centers for clusters in sent.values()])
        sent_bytes = {client: retrieval.count_bytes(clusters) for client, clusters in sent.items()}
        self._notes = {"sent_bytes": sent_bytes}
        index = self.tuned(index, queries, seed)
        return {
            client: retrieval.to_added(
                retrieve_direct(index, clusters.centers, self.number, self.alpha), public
            )
            for client, clusters in sent.items()
        }
