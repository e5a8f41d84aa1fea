"""The projector of FedDCA* and the two maps that it is measured by: itself before training, and least squares.

Z. Wang et al. (FedDCA), 2024, https://arxiv.org/abs/2409.20135, section 4.3. These start from vectors that are there
already; `fedlight fit --config projector.yaml` starts from texts.
"""

import tempfile
from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
from torch.utils.data import DataLoader

from fedlight.datamodules.federated.rounds import PooledSampler
from fedlight.datamodules.vectors.embeddings import EmbeddingPairs
from fedlight.evaluation.alignment import apply_map, least_squares_map
from fedlight.modules.projector import ProjectorModule

Map = Callable[[np.ndarray], np.ndarray]
"""Vectors ``(texts, small dimension)`` -> unit vectors ``(texts, large dimension)``."""


def fit_projector(
    small: np.ndarray,
    large: np.ndarray,
    epochs: int = 10,
    batch_size: int = 256,
    seed: int = 0,
    **options: Any,
) -> ProjectorModule:
    """Trains a projector on the CPU, or where there is one on the accelerator.

    Args:
        small: ``(texts, small dimension)`` float32.
        large: ``(texts, large dimension)`` float32; row i is of the same text.
        epochs: passes over the texts, at least 1.
        batch_size: texts that eq. 4 tells from each other, at least 2.
        seed: of the weights and of the order.
        options: further arguments of `ProjectorModule`.
    """
    module = ProjectorModule(small.shape[1], large.shape[1], seed=seed, **options)
    pairs = EmbeddingPairs(small, large)
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


def maps(small: np.ndarray, large: np.ndarray, seed: int = 0, **options: Any) -> dict[str, Map]:
    """The trained projector, the untrained one and the least-squares map, by name.

    Args:
        small: see `fit_projector`, as for the others.
        large: the same.
        seed: the same.
        options: the same.
    """
    trained = fit_projector(small, large, seed=seed, **options)
    untrained = ProjectorModule(small.shape[1], large.shape[1], seed=seed)
    weights = least_squares_map(small, large)
    return {
        "trained": trained.project,
        "untrained": untrained.project,
        "least squares": lambda vectors: apply_map(weights, vectors),
    }
