"""The client's side of retrieval: of its instructions it sends centres of clusters and their sizes, nothing else.

Wang et al., "Federated Instruction Tuning of LLMs with Domain Coverage Augmentation" (FedDCA),
https://arxiv.org/abs/2409.20135, Algorithm 1, lines 1 to 4.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from fedlight.datamodules.clients.clusters import Clusters, cluster
from fedlight.datamodules.rows.fields import instruction_text
from fedlight.datamodules.vectors.encoders import Encoder
from fedlight.support.seeding import derive_seed
from fedlight.support.types import Fields


def client_centers(
    encoder: Encoder, clients: Mapping[str, Sequence[Fields]], num_clusters: int, seed: int
) -> dict[str, Clusters]:
    """What every client sends; one call encodes for all, as every row is encoded by itself.

    Args:
        encoder: of the clients.
        clients: each one's rows, at least one.
        num_clusters: xi, >= 1; a client with fewer distinct instructions sends fewer centres.
        seed: of the starting points, with the client's name.
    """
    vectors = encoder.encode([instruction_text(row) for rows in clients.values() for row in rows])
    ends = np.cumsum([len(rows) for rows in clients.values()])
    return {
        client: cluster(own, num_clusters, derive_seed(seed, "centres", client))
        for client, own in zip(clients, np.split(vectors, ends[:-1]), strict=True)
    }


def sent_bytes(clusters: Clusters) -> int:
    """Bytes of a client's message: centres in fp32, sizes as 64-bit numbers.

    Example:
        >>> import numpy as np
        >>> sent_bytes(Clusters(np.zeros((10, 384), np.float32), np.zeros(10, np.int64)))
        15440
    """
    return int(clusters.centers.nbytes + clusters.sizes.nbytes)


def check_clusters(clusters: int) -> None:
    """k-means needs a cluster.

    Raises:
        ValueError: ``clusters`` < 1.
    """
    if clusters < 1:
        raise ValueError(f"clusters={clusters}: a client sends at least 1 centre, for example 10.")


def check_alpha(alpha: float | None) -> None:
    """A similarity is a cosine.

    Raises:
        ValueError: ``alpha`` is not in (-1, 1].
    """
    if alpha is not None and not -1 < alpha <= 1:
        raise ValueError(
            f"alpha={alpha} is compared with cosines: set it in (-1, 1], for example 0.7, or null for no bound."
        )
