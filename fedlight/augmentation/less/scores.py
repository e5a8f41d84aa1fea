"""The scores of LESS: the influence of every public row on every client, summed over the epochs of a warm-up.

M. Xia et al., "LESS: Selecting Influential Data for Targeted Instruction Tuning", ICML 2024,
https://arxiv.org/abs/2402.04333, eq. 3. The features of public rows are compared as they come and not kept: what is held
is one number for each public row and client (400,000 rows and 10 clients: 32 MB).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedlight.augmentation.less.blocks import ScoredBlocks
from fedlight.augmentation.less.gradient_features import Moments, gradient_features, influence
from fedlight.augmentation.less.random_projection import RandomProjection
from fedlight.augmentation.less.warm_up import Epoch, warm_up
from fedlight.datamodules.text.examples import ResponseExamples, collate_responses
from fedlight.modules.language.adapters import trained_parameters
from fedlight.modules.sft import SFTModule
from fedlight.support.console import progress_bar

BLOCK = 1000
"""Rows whose scores are kept in one file."""


class PaddedExamples:
    """Examples as batches of a module, padded on the right.

    Args:
        examples: prompts with responses.
        padding: padding token.
        device: where the module is.
    """

    def __init__(self, examples: ResponseExamples, padding: int, device: torch.device) -> None:
        self.examples, self.padding, self.device = examples, padding, device

    def __len__(self) -> int:
        """Number of examples."""
        return len(self.examples)

    def batch(self, indices: Sequence[int] | np.ndarray) -> dict[str, Tensor]:
        """The examples of these indices as a batch on the device."""
        batch = collate_responses([self.examples[index] for index in indices], self.padding)
        return {name: part.to(self.device) for name, part in batch.items()}

    def longest_first(self) -> np.ndarray:
        """Every index once, in an order in which too large a batch fails at once."""
        return np.argsort(-self.examples.lengths, kind="stable")


class Features(NamedTuple):
    """How features are taken of rows."""

    module: SFTModule
    project: RandomProjection
    batch_size: int
    way: str

    def of(
        self, rows: PaddedExamples, indices: np.ndarray, moments: Moments | None = None
    ) -> Iterator[tuple[np.ndarray, Tensor]]:
        """Some of the indices and the features of these rows ``(rows, dimension)``, until all were there.

        Args:
            rows: of which features are taken.
            indices: of those among them that are wanted.
            moments: of Adam, for the features of rows to be learned from.
        """
        for start in range(0, len(indices), self.batch_size):
            some = indices[start : start + self.batch_size]
            yield some, gradient_features(self.module, rows.batch(some), self.project, moments, self.way)

    def mean(self, rows: PaddedExamples) -> Tensor:
        """The mean of the plain gradients' features, ``(dimension,)``."""
        parts = [found.sum(dim=0) for _, found in self.of(rows, rows.longest_first())]
        return torch.stack(parts).sum(dim=0) / len(rows)


def influence_scores(
    features: Features,
    candidates: PaddedExamples,
    targets: Sequence[PaddedExamples],
    epochs: Sequence[Sequence[Sequence[int]]],
    lr: float,
    done: ScoredBlocks,
) -> tuple[np.ndarray, list[Epoch]]:
    """Warms the module up on some of the candidates and scores all of them after each epoch.

    Args:
        features: of the module that is warmed up; it is trained in place.
        candidates: what is scored.
        targets: what it shall be good for, rows of each client.
        epochs: of the warm-up: batches of indices of candidates.
        lr: its highest learning rate.
        done: scores that are known, and where new ones are kept.

    Returns:
        ``(candidates, targets)`` fp64, cosines weighted by the epochs' mean learning rates; and the epochs.
    """
    scores, past, order = np.zeros((len(candidates), len(targets))), [], candidates.longest_first()
    with progress_bar("LESS: gradients of public rows", len(epochs) * len(candidates)) as advance:
        for number, epoch in enumerate(warm_up(features.module, epochs, candidates.batch, lr)):
            past.append(epoch)
            aims = torch.stack([features.mean(rows) for rows in targets])
            for block, start in enumerate(range(0, len(order), BLOCK)):
                indices = order[start : start + BLOCK]
                found = done.read(number, block, (len(indices), len(targets)))
                if found is None:
                    found = _cosines(features.of(candidates, indices, epoch.moments), aims)
                    done.write(number, block, found)
                scores[indices] += epoch.mean_lr * found
                advance(len(indices))
    return scores / sum(epoch.mean_lr for epoch in past), past


def _cosines(found: Iterable[tuple[np.ndarray, Tensor]], aims: Tensor) -> np.ndarray:
    """Of features with those of the clients ``(clients, dimension)``: ``(rows, clients)``."""
    return np.concatenate([influence(some, aims).double().cpu().numpy() for _, some in found])


def make_features(module: SFTModule, dimension: int, batch_size: int, way: str, seed: int) -> Features:
    """Features of a configured module's trained weights, projected to ``dimension`` numbers."""
    weights: Mapping[str, Tensor] = trained_parameters(module)
    sizes = {name: weight.numel() for name, weight in weights.items()}
    device = next(iter(weights.values())).device
    return Features(module, RandomProjection(sizes, dimension, seed, device), batch_size, way)
