"""FedDCA: the server picks one centre of each client so that together they cover the domain, and retrieves around these.

Wang et al., "Federated Instruction Tuning of LLMs with Domain Coverage Augmentation", https://arxiv.org/abs/2409.20135,
Algorithm 1. At the client: encode the instructions, cluster them, send centres and sizes. At the server: greedy selection of
a centre for each client, then for each client the top N_p public instructions whose cosine to that centre is below alpha,
so that what overlaps with private data is left out. Where fewer lie below alpha a client gets these, and it is said.
"""

from collections.abc import Mapping, Sequence

from fedlight.augmentation.client_centers import check_alpha, check_clusters, client_centers, sent_bytes
from fedlight.augmentation.public_index import IndexKind, check_index_folder, public_index, rows_of
from fedlight.datamodules.clients.clusters import Clusters
from fedlight.datamodules.instructions.augmentation import Added, Augmentation
from fedlight.datamodules.vectors.encoders import Encoder
from fedlight.datamodules.vectors.retrieval import retrieve
from fedlight.datamodules.vectors.selection import Selection, check_selection, select_centers
from fedlight.datamodules.vectors.vector_index import VectorIndex
from fedlight.support.types import Fields


class FedDCA(Augmentation):
    """Greedy choice of client centres and retrieval around them.

    Args:
        encoder: of the clients and of the server.
        number: N_p, rows for each client, >= 1.
        clusters: xi, centres that a client sends, >= 1; fewer where it has fewer distinct instructions.
        alpha: only rows less similar than this to the client's centre, in (-1, 1]; None: no bound.
        index: ``exact``, ``hnsw``, or ``auto``: exact below 50,000 rows.
        index_folder: where the index is kept for later runs; None: nowhere.
        selection: of the i-th further of N clients ``drop_i`` leaves the i centres out that are most similar to those
            chosen, as the paper's text says; ``keep_n_minus_i`` leaves all out but the N - i least similar, as its
            Algorithm 1 is printed. With ``clusters`` = N both are the same; see `fedlight.datamodules.vectors.selection`.

    Raises:
        ValueError: a setting is out of range.
    """

    without_effect = ("index_folder",)

    def __init__(
        self,
        encoder: Encoder,
        number: int,
        clusters: int = 10,
        alpha: float | None = 0.7,
        index: IndexKind = "auto",
        index_folder: str | None = None,
        selection: Selection = "drop_i",
    ) -> None:
        super().__init__(number)
        check_clusters(clusters)
        check_alpha(alpha)
        check_selection(selection)
        self.encoder, self.clusters, self.alpha, self.selection = encoder, clusters, alpha, selection
        self.index, self.index_folder = index, index_folder
        self._sent: dict[str, dict[str, object]] = {}

    def augment(
        self, clients: Mapping[str, Sequence[Fields]], public: Sequence[Fields], seed: int
    ) -> dict[str, list[Added]]:
        """See `Augmentation.augment`; the score is the cosine to the client's chosen centre."""
        check_index_folder(self.index_folder)
        sent = client_centers(self.encoder, clients, self.clusters, seed)
        index = public_index(self.encoder, public, self.index, self.index_folder)
        chosen = select_centers(sent, seed, self.selection)
        self._sent = notes(sent, chosen)
        return retrieved(index, public, sent, chosen, self.number, self.alpha)

    def why_fewer(self) -> str:
        """See `Augmentation.why_fewer`."""
        return too_few(self.alpha)

    def record(self) -> dict[str, object]:
        """Of each client the bytes that it sent, how many centres, and which was chosen."""
        return {"clients": self._sent}


def retrieved(
    index: VectorIndex,
    public: Sequence[Fields],
    sent: Mapping[str, Clusters],
    chosen: Mapping[str, int],
    number: int,
    alpha: float | None,
) -> dict[str, list[Added]]:
    """The server's answer to every client: the nearest public rows below ``alpha`` of its chosen centre.

    Args:
        index: of the public instructions, in the space of the centres.
        public: their rows.
        sent: what the clients sent.
        chosen: which centre of each.
        number: rows for each.
        alpha: see `FedDCA`.
    """
    centers = {client: clusters.centers[chosen[client]] for client, clusters in sent.items()}
    hits = retrieve(index, centers, number, alpha)
    return {client: rows_of(hits[client], public) for client in sent}


def notes(sent: Mapping[str, Clusters], chosen: Mapping[str, int]) -> dict[str, dict[str, object]]:
    """What is worth keeping of the clients' messages, before anything was projected.

    Example:
        >>> import numpy as np
        >>> notes({"u": Clusters(np.eye(2, dtype=np.float32), np.array([3, 1]))}, {"u": 1})
        {'u': {'sent_bytes': 32, 'sizes': [3, 1], 'chosen': 1}}
    """
    return {
        client: {
            "sent_bytes": sent_bytes(clusters),
            "sizes": clusters.sizes.tolist(),
            "chosen": chosen[client],
        }
        for client, clusters in sent.items()
    }


def too_few(alpha: float | None) -> str:
    """Why a client got fewer rows than wanted."""
    return "no more rows" if alpha is None else f"no more rows lie below alpha={alpha}"
