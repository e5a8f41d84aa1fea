"""Scores of LESS: the influence of every public row on every client, summed over the epochs of a warm-up.

M. Xia et al., "LESS: Selecting Influential Data for Targeted Instruction Tuning", ICML 2024,
https://arxiv.org/abs/2402.04333, eq. 3. The features of public rows are compared at once and not kept: memory holds one
number per public row and client (400,000 rows and 10 clients: 32 MB).

Scores are written to disk in blocks of rows, so that a killed run can be resumed. The files lie in ``FOLDER/KEY/`` with a
key of settings, seed and texts, so that several runs may share the folder.
"""

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedlight.augmentation.less.features import Moments, RandomProjection, gradient_features, influence
from fedlight.augmentation.less.warm_up import Epoch, warm_up
from fedlight.datamodules.instructions.augmentation_record import digest_rows
from fedlight.datamodules.text.examples import ResponseExamples, collate_responses
from fedlight.modules.language.adapters import trained_parameters
from fedlight.modules.sft import SFTModule
from fedlight.processes.work import for_each, is_first, once
from fedlight.support.console import progress_bar
from fedlight.support.files import read_bytes, sealed_bytes, unsealed_bytes, write_whole
from fedlight.support.types import Fields

BLOCK = 1000
"""Rows whose scores are kept in one file."""


class ScoredBlocks:
    """Files of scores by epoch and block of rows.

    Args:
        folder: folder of one run; None keeps nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def read(self, epoch: int, block: int, shape: tuple[int, int]) -> Tensor | None:
        """Return the scores of a block, or None if the file is missing or damaged."""
        if self.folder is None:
            return None
        try:
            scores: np.ndarray = np.load(io.BytesIO(unsealed_bytes(read_bytes(self._file(epoch, block)))))
        except (OSError, ValueError):
            return None
        return torch.from_numpy(scores) if scores.shape == shape else None

    def write(self, epoch: int, block: int, scores: np.ndarray) -> None:
        """Write the scores ``(rows, clients)`` of a block; a reader sees all of them or none."""
        if self.folder is None:
            return
        file = io.BytesIO()
        np.save(file, scores)
        write_whole(self._file(epoch, block), sealed_bytes(file.getvalue()))

    def _file(self, epoch: int, block: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{epoch}-{block}.npy"


def find_blocks(
    folder: str | None,
    settings: Mapping[str, object],
    clients: Mapping[str, Sequence[Fields]],
    public: Sequence[Fields],
    seed: int,
) -> ScoredBlocks:
    """Return the blocks of a run in the folder of all runs, where its key follows from all other arguments."""
    if folder is None:
        return ScoredBlocks(None)
    texts = [(client, digest_rows(rows)) for client, rows in clients.items()]
    key = json.dumps([settings, seed, texts, digest_rows(public)], sort_keys=True)
    return ScoredBlocks(Path(folder).expanduser() / hashlib.blake2b(key.encode(), digest_size=8).hexdigest())


class PaddedExamples:
    """Examples as batches on a device, padded on the right with a token."""

    def __init__(self, examples: ResponseExamples, padding: int, device: torch.device) -> None:
        self.examples, self.padding, self.device = examples, padding, device

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.examples)

    def batch(self, indices: Sequence[int] | np.ndarray) -> dict[str, Tensor]:
        """Return the examples of these indices as a batch on the device."""
        batch = collate_responses([self.examples[index] for index in indices], self.padding)
        return {name: part.to(self.device) for name, part in batch.items()}

    def longest_first(self) -> np.ndarray:
        """Return all indices, the longest example first."""
        return np.argsort(-self.examples.lengths, kind="stable")  # too large a batch fails at once


class Features:
    """Gradient features of examples by the trained weights of a configured module with one adapter.

    Gradients of ``batch_size`` examples are in memory at once.
    """

    def __init__(self, module: SFTModule, dimension: int, batch_size: int, way: str, seed: int) -> None:
        self.module, self.batch_size, self.way = module, batch_size, way
        weights = trained_parameters(module)
        sizes = {name: weight.numel() for name, weight in weights.items()}
        self.project = RandomProjection(sizes, dimension, seed, next(iter(weights.values())).device)

    def batches(self, indices: np.ndarray) -> list[np.ndarray]:
        """Return these indices in batches."""
        return [indices[start : start + self.batch_size] for start in range(0, len(indices), self.batch_size)]

    def compute(self, examples: PaddedExamples, batch: np.ndarray, moments: Moments | None = None) -> Tensor:
        """Return the features of a batch of indices, ``(batch, dimension)``; see `gradient_features`."""
        return gradient_features(self.module, examples.batch(batch), self.project, moments, self.way)

    def mean(self, examples: PaddedExamples) -> Tensor:
        """Return the mean of the plain gradients' features, ``(dimension,)``."""
        parts = [self.compute(examples, batch).sum(dim=0) for batch in self.batches(examples.longest_first())]
        return torch.stack(parts).sum(dim=0) / len(examples)


def _compute(
    features: Features, candidates: PaddedExamples, indices: np.ndarray, moments: Moments, means: Tensor
) -> Tensor:
    """Return the scores of these candidates, ``(candidates, targets)`` fp64; several processes share the batches."""

    def score(batch: np.ndarray) -> Tensor:
        return influence(features.compute(candidates, batch, moments), means).double().cpu()

    return torch.cat(for_each(score, features.batches(indices)))


def influence_scores(
    features: Features,
    candidates: PaddedExamples,
    targets: Sequence[PaddedExamples],
    epochs: Sequence[Sequence[Sequence[int]]],
    lr: float,
    blocks: ScoredBlocks,
) -> tuple[np.ndarray, list[Epoch]]:
    """Warm the module up on some of the candidates and score all of them after each epoch.

    The scores, ``(candidates, targets)`` fp64, are cosines weighted by the epochs' mean learning rates; ``epochs`` has the
    batches of each epoch as indices of candidates, and ``blocks`` keeps known scores. Of several processes each warms up its
    module, and they share the gradients.
    """
    scores, finished, order = np.zeros((len(candidates), len(targets))), [], candidates.longest_first()
    with progress_bar("LESS: gradients of public rows", len(epochs) * len(candidates)) as advance:
        for number, epoch in enumerate(warm_up(features.module, epochs, candidates.batch, lr)):
            finished.append(epoch)
            found_means = for_each(lambda examples: features.mean(examples).cpu(), targets)
            means = torch.stack(found_means).to(candidates.device)
            for block, start in enumerate(range(0, len(order), BLOCK)):
                indices = order[start : start + BLOCK]
                # One process looks for all.
                shape = len(indices), len(targets)
                block_scores: Tensor | None = once(partial(blocks.read, number, block, shape))
                if block_scores is None:
                    block_scores = _compute(features, candidates, indices, epoch.moments, means)
                    if is_first():
                        blocks.write(number, block, block_scores.numpy())  # each has all scores
                scores[indices] += epoch.mean_lr * block_scores.numpy()  # lr_i cos(step_i, gradient_i)
                advance(len(indices))
    return scores / sum(epoch.mean_lr for epoch in finished), finished
