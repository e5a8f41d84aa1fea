"""FedDCA and what it is compared with, on vectors that are there already: to study retrieval without a language model.

Z. Wang et al. (FedDCA), 2024, https://arxiv.org/abs/2409.20135, Algorithms 1 and 2. The classes of `fedlight.augmentation`
do the same from texts. Rows are positions among all vectors, those of the clients included.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from fedlight.datamodules.clients.clusters import Clusters, cluster
from fedlight.datamodules.vectors.retrieval import retrieve, retrieve_direct
from fedlight.datamodules.vectors.selection import select_centers
from fedlight.datamodules.vectors.vector_index import VectorIndex
from fedlight.support.seeding import derive_seed

VectorsByClient = Mapping[str, np.ndarray]
"""Client -> rows."""
Sent = Mapping[str, Clusters]
"""Client -> its centres and their sizes."""


class Server(NamedTuple):
    """What the server holds, and what the clients sent.

    Attributes:
        rows: that are public, ``(public,)``, and not those of a client.
        public_index: of their vectors, in this order.
        sent: by clients with the server's encoder.
        projected: name of a projection -> what clients with a small encoder sent, projected.
    """

    rows: np.ndarray
    public_index: VectorIndex
    sent: Sent
    projected: Mapping[str, Sent]


def send(vectors: np.ndarray, clients: VectorsByClient, clusters: int, seed: int) -> dict[str, Clusters]:
    """What each client sends: at most ``clusters`` centres of its rows.

    Args:
        vectors: of all rows, ``(rows, dimension)``, unit length.
        clients: each one's rows.
        clusters: xi, at least 1.
        seed: of k-means, with the client's name.

    Example:
        >>> sent = send(np.eye(4, dtype=np.float32), {"u": np.array([0, 2])}, clusters=10, seed=0)
        >>> sent["u"].sizes.tolist()
        [1, 1]
    """
    return {
        client: cluster(vectors[own], clusters, derive_seed(seed, "centres", client))
        for client, own in clients.items()
    }


def around_one(
    server: Server, sent: Sent, chosen: Mapping[str, int], number: int, alpha: float | None
) -> dict[str, np.ndarray]:
    """The nearest public rows of one centre of each client, best first; see `retrieve`."""
    centers = {client: own.centers[chosen[client]] for client, own in sent.items()}
    found = retrieve(server.public_index, centers, number, alpha)
    return {client: server.rows[hits.rows] for client, hits in found.items()}


def around_all(server: Server, number: int, alpha: float | None) -> dict[str, np.ndarray]:
    """The nearest public rows of all centres of each client, best first; see `retrieve_direct`."""
    return {
        client: server.rows[retrieve_direct(server.public_index, own.centers, number, alpha).rows]
        for client, own in server.sent.items()
    }


def at_random(server: Server, rows: np.ndarray, number: int, seed: int) -> dict[str, np.ndarray]:
    """Some of ``rows``, drawn anew for each client."""
    return {
        client: np.random.default_rng(derive_seed(seed, "random", client)).permutation(rows)[:number]
        for client in server.sent
    }


def ways(
    server: Server, inside: np.ndarray, number: int, alpha: float, seed: int
) -> dict[str, Callable[[], dict[str, np.ndarray]]]:
    """Ways of augmentation by name; called, each gives the rows of every client.

    ``none``, ``random``, ``direct``, ``FedDCA* (name)`` for each projection and ``FedDCA`` are the paper's. ``FedDCA without
    alpha`` and ``direct below alpha`` show what alpha does, ``largest`` (every client's largest cluster) what the greedy
    choice does, and ``in domain at random`` what a server could do that knew the domain.

    Args:
        server: see `Server`.
        inside: the public rows of the domain.
        number: rows for each client, at least 1.
        alpha: similarity from which rows are passed over.
        seed: of draws and of the order of the clients.
    """
    chosen = select_centers(server.sent, seed)
    largest = {client: int(own.sizes.argmax()) for client, own in server.sent.items()}
    found: dict[str, Callable[[], dict[str, np.ndarray]]] = {
        "none": lambda: at_random(server, server.rows, 0, seed),
        "random": lambda: at_random(server, server.rows, number, seed),
        "direct": lambda: around_all(server, number, None),
    }
    for name, sent in server.projected.items():
        of_small = select_centers(sent, seed)
        found[f"FedDCA* ({name})"] = lambda sent=sent, of=of_small: around_one(
            server, sent, of, number, alpha
        )  # type: ignore[misc]
    return found | {
        "FedDCA": lambda: around_one(server, server.sent, chosen, number, alpha),
        "FedDCA without alpha": lambda: around_one(server, server.sent, chosen, number, None),
        "largest": lambda: around_one(server, server.sent, largest, number, alpha),
        "direct below alpha": lambda: around_all(server, number, alpha),
        "in domain at random": lambda: at_random(server, inside, number, seed),
    }


def same_clusters(
    large: np.ndarray, small: np.ndarray, clients: VectorsByClient, sent: Sent, chosen: Mapping[str, int]
) -> dict[str, Clusters]:
    """Of each client's chosen cluster the centre that its small encoder would have sent.

    k-means of another encoder finds other clusters; with these, a projector alone is what makes a difference.

    Args:
        large: vectors of all rows by the server's encoder.
        small: by the clients' small one.
        clients: each one's rows.
        sent: centres in the server's space.
        chosen: which one of each client.

    Returns:
        Client -> one centre, unit length, and the number of its rows.

    Example:
        >>> large, small = np.eye(3, dtype=np.float32), np.eye(3, 2, dtype=np.float32)
        >>> sent = {"u": Clusters(large[:2], np.array([1, 1]))}
        >>> same_clusters(large, small, {"u": np.array([0, 1])}, sent, {"u": 1})["u"].centers.tolist()
        [[0.0, 1.0]]
    """
    found = {}
    for client, own in clients.items():
        members = own[(large[own] @ sent[client].centers.T).argmax(axis=1) == chosen[client]]
        center = small[members].mean(axis=0)
        found[client] = Clusters((center / np.linalg.norm(center))[None], np.array([len(members)]))
    return found
