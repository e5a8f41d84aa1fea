"""Agreement of vectors that were mapped from one encoder's space to another's.

For FedDCA* (Z. Wang et al., 2024, https://arxiv.org/abs/2409.20135, section 4.3), whose projector maps a small encoder's
vectors to a large one's for retrieval: besides the cosine, does a mapped vector find its own text among held-out ones?
"""

from typing import NamedTuple

import numpy as np

BLOCK = 1024


class Alignment(NamedTuple):
    """Agreement of mapped vectors with their targets."""

    cosine: float  # mean cosine of a mapped vector and its target
    top1: float  # share of mapped vectors whose own target is the nearest
    recall10: float  # share of mapped vectors whose own target is among the ten nearest


def alignment(mapped: np.ndarray, targets: np.ndarray) -> Alignment:
    """Compare mapped vectors with their targets; a target as near as the own one does not count as nearer.

    Args:
        mapped: ``(texts, dimension)``, of any length above 0.
        targets: ``(texts, dimension)``; row i belongs to mapped row i.

    Raises:
        ValueError: there is no text, or the shapes differ.
    """
    if mapped.shape != targets.shape or mapped.ndim != 2 or not len(mapped):
        raise ValueError(
            f"mapped {mapped.shape} and targets {targets.shape} must be equal (texts, dimension)"
        )
    mapped, targets = unit(mapped), unit(targets)
    to_target = np.einsum("td,td->t", mapped, targets)  # [texts]: cosine with the own target
    nearer = np.empty(len(mapped), dtype=np.int64)
    for start in range(0, len(mapped), BLOCK):
        rows = slice(start, start + BLOCK)
        similar = mapped[rows] @ targets.T  # [BLOCK, texts]
        # The tolerance keeps rounding in the matrix product from putting the own target before itself.
        nearer[rows] = (similar > to_target[rows, None] + 1e-6).sum(axis=1)
    shares = ((~np.isnan(to_target) & (nearer < most)).mean() for most in (1, 10))  # NaN finds nothing
    return Alignment(float(to_target.mean()), *map(float, shares))


def unit(vectors: np.ndarray) -> np.ndarray:
    """Scale rows to length 1; rows of zeros stay."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: np.ndarray = vectors / np.maximum(lengths, 1e-12)  # else rows of zeros become NaN
    return scaled
