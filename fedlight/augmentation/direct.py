"""Direct retrieval: each of a client's centres brings its nearest public rows, without a look at the other clients.

Wang et al., "Federated Instruction Tuning of LLMs with Domain Coverage Augmentation" (FedDCA),
https://arxiv.org/abs/2409.20135, appendix A.3, Algorithm 2: the top N_p / xi of every local centre, without repeats.
"""

from collections.abc import Mapping, Sequence

from fedlight.augmentation.client_centers import check_alpha, check_clusters, client_centers, sent_bytes
from fedlight.augmentation.feddca import too_few
from fedlight.augmentation.public_index import IndexKind, check_index_folder, public_index, rows_of
from fedlight.datamodules.instructions.augmentation import Added, Augmentation
from fedlight.datamodules.vectors.encoders import Encoder
from fedlight.datamodules.vectors.retrieval import retrieve_direct
from fedlight.support.types import Fields


class DirectRetrieval(Augmentation):
    """The nearest public rows of all of a client's centres.

    Args:
        encoder: of the clients and of the server.
        number: rows for each client, >= 1.
        clusters: centres of each client, >= 1.
        alpha: only rows less similar than this to the centre that brings them; None, as in the paper: no bound.
        index: ``exact``, ``hnsw``, or ``auto``: exact below 50,000 rows.
        index_folder: where the index is kept for later runs; None: nowhere.
    """

    without_effect = ("index_folder",)

    def __init__(
        self,
        encoder: Encoder,
        number: int,
        clusters: int = 10,
        alpha: float | None = None,
        index: IndexKind = "auto",
        index_folder: str | None = None,
    ) -> None:
        super().__init__(number)
        check_clusters(clusters)
        check_alpha(alpha)
        self.encoder, self.clusters, self.alpha = encoder, clusters, alpha
        self.index, self.index_folder = index, index_folder
        self._bytes: dict[str, int] = {}

    def augment(
        self, clients: Mapping[str, Sequence[Fields]], public: Sequence[Fields], seed: int
    ) -> dict[str, list[Added]]:
        """See `Augmentation.augment`; the score is the cosine to the centre that brought the row."""
        check_index_folder(self.index_folder)
        sent = client_centers(self.encoder, clients, self.clusters, seed)
        self._bytes = {client: sent_bytes(clusters) for client, clusters in sent.items()}
        index = public_index(self.encoder, public, self.index, self.index_folder)
        return {
            client: rows_of(retrieve_direct(index, clusters.centers, self.number, self.alpha), public)
            for client, clusters in sent.items()
        }

    def why_fewer(self) -> str:
        """See `Augmentation.why_fewer`."""
        return too_few(self.alpha)

    def record(self) -> dict[str, object]:
        """The bytes that each client sent."""
        return {"sent_bytes": self._bytes}
