"""FedDCA, its baselines and its projector on given vectors, for coverage.py: retrieval without a language model.

Z. Wang et al. (FedDCA), 2024, https://arxiv.org/abs/2409.20135, Algorithms 1 and 2 and section 4.3. The classes of
`fedlight.augmentation` start from texts. Rows are positions among all vectors, those of the clients included.
"""

import tempfile
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader, StackDataset

from fedlight.datamodules.federated.rounds import PooledSampler
from fedlight.datamodules.vectors.clusters import Clusters, cluster
from fedlight.datamodules.vectors.retrieval import retrieve, retrieve_direct
from fedlight.datamodules.vectors.selection import select_centers
from fedlight.datamodules.vectors.vector_index import VectorIndex
from fedlight.modules.projector import ProjectorModule
from fedlight.support.seeding import derive_seed

Rows = Mapping[str, np.ndarray]
"""Client -> rows."""
Sent = Mapping[str, Clusters]
"""Client -> its centres and their sizes."""


class Server(NamedTuple):
    """Public vectors of the server, and the messages of the clients.

    Attributes:
        rows: public rows, ``(public,)``.
        public_index: index of their vectors, in this order.
        sent: messages of clients with the server's encoder.
        projected: name of a projection -> projected messages of clients with a small encoder.
    """

    rows: np.ndarray
    public_index: VectorIndex
    sent: Sent
    projected: Mapping[str, Sent]


def send(vectors: np.ndarray, clients: Rows, clusters: int, seed: int) -> dict[str, Clusters]:
    """Return the centres that each client sends, at most ``clusters`` of its rows.

    Args:
        vectors: vectors of all rows, ``(rows, dimension)``, unit length.
        clients: each client's rows.
        clusters: xi, at least 1.
        seed: seed of k-means, together with the client's name.

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
    """Return the nearest public rows of one centre of each client, best first; see `retrieve`."""
    centers = {client: own.centers[chosen[client]] for client, own in sent.items()}
    found = retrieve(server.public_index, centers, number, alpha)
    return {client: server.rows[hits.rows] for client, hits in found.items()}


def around_all(server: Server, number: int, alpha: float | None) -> dict[str, np.ndarray]:
    """Return the nearest public rows of all centres of each client, best first; see `retrieve_direct`."""
    return {
        client: server.rows[retrieve_direct(server.public_index, own.centers, number, alpha).rows]
        for client, own in server.sent.items()
    }


def at_random(server: Server, rows: np.ndarray, number: int, seed: int) -> dict[str, np.ndarray]:
    """Return ``number`` of ``rows``, drawn anew for each client."""
    return {
        client: np.random.default_rng(derive_seed(seed, "random", client)).permutation(rows)[:number]
        for client in server.sent
    }


def ways(
    server: Server, inside: np.ndarray, number: int, alpha: float, seed: int
) -> dict[str, Callable[[], dict[str, np.ndarray]]]:
    """Return the ways of augmentation by name; a call of one returns the rows of every client.

    ``none``, ``random``, ``direct``, ``FedDCA* (name)`` for each projection and ``FedDCA`` are the paper's. ``FedDCA without
    alpha`` and ``direct below alpha`` show the effect of alpha, ``largest`` (every client's largest cluster) that of the
    greedy selection, and ``in domain at random`` the way of a server that knew the domain.

    Args:
        server: see `Server`.
        inside: public rows of the domain.
        number: rows for each client, at least 1.
        alpha: rows of this similarity or more are skipped.
        seed: seed of draws and of the order of the clients.
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
        )
    return found | {
        "FedDCA": lambda: around_one(server, server.sent, chosen, number, alpha),
        "FedDCA without alpha": lambda: around_one(server, server.sent, chosen, number, None),
        "largest": lambda: around_one(server, server.sent, largest, number, alpha),
        "direct below alpha": lambda: around_all(server, number, alpha),
        "in domain at random": lambda: at_random(server, inside, number, seed),
    }


def fit_projector(
    small: np.ndarray,
    large: np.ndarray,
    epochs: int = 10,
    batch_size: int = 256,
    seed: int = 0,
    **options: Any,
) -> ProjectorModule:
    """Train a projector, on an accelerator if there is one; `fedlight fit --config projector.yaml` starts from texts.

    Args:
        small: ``(texts, small dimension)`` float32.
        large: ``(texts, large dimension)`` float32; row i is of the same text.
        epochs: passes over the texts, at least 1.
        batch_size: texts in the sum of eq. 4, at least 2.
        seed: seed of the weights and of the order.
        options: further arguments of `ProjectorModule`.
    """
    module = ProjectorModule(small.shape[1], large.shape[1], seed=seed, **options)
    pairs = StackDataset(small=torch.from_numpy(small), large=torch.from_numpy(large))
    loader = DataLoader(pairs, batch_sampler=PooledSampler(len(pairs), batch_size, seed))
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            max_epochs=epochs,
            devices=1,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
            num_sanity_val_steps=0,
        )
        trainer.fit(module, loader, loader)  # not validated; without a loader Lightning warns of it
    return module.eval()
