"""Comparisons of texts as pairs of frozen vectors, which an encoder has made once."""

from collections.abc import Sequence
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor

from fedlight.datamodules.text.encoding import Comparison
from fedlight.datamodules.text.examples import Examples
from fedlight.datamodules.vectors.encoders import Encoder, HashedEncoder, SentenceEncoder


class FeaturePair(TypedDict):
    """Comparison in one order; ``label`` is 0 where the first answer is better.

    ``rows`` are the places of both answers in ``vectors``, ``(answers, dimension)``, which all examples of a set share: a
    batch takes its vectors in one step, which is ten times faster than one by one.
    """

    vectors: Tensor
    rows: np.ndarray
    label: int


class FeatureExamples(Examples):
    """Comparisons for a selector on features, one example per vote: such a selector does not see an order.

    ``vectors`` are those of the distinct answers, ``(answers, dimension)``, ``pairs`` the rows of both answers of each
    example, ``(examples, 2)``, and ``labels`` 0 or 1, ``(examples,)``.
    """

    def __init__(self, vectors: Tensor, pairs: np.ndarray, labels: np.ndarray) -> None:
        self.vectors, self.pairs, self.labels = vectors, pairs, labels
        self.lengths = np.ones(len(pairs), dtype=np.int64)  # features have no tokens
        self.labelled = np.zeros_like(self.lengths)

    @classmethod
    def from_votes(
        cls, encoder: Encoder, comparisons: Sequence[Comparison], comparison: np.ndarray, winner: np.ndarray
    ) -> "FeatureExamples":
        """Return the examples of all votes, given the index of each vote's comparison and of its winner, ``(votes,)``.

        Each distinct answer is encoded once.
        """
        rows: dict[str, int] = {}
        pairs = [
            [rows.setdefault(text, len(rows)) for text in (each.first, each.second)] for each in comparisons
        ]
        return cls(torch.from_numpy(encoder.encode([*rows])), np.array(pairs)[comparison], winner)

    def __getitem__(self, item: int) -> FeaturePair:
        return {"vectors": self.vectors, "rows": self.pairs[item], "label": int(self.labels[item])}


def collate_features(examples: list[FeaturePair]) -> dict[str, Tensor]:
    """Return a batch of examples of one set: ``features`` ``(batch, 2, dimension)``, ``labels`` ``(batch,)``."""
    rows = torch.from_numpy(np.stack([example["rows"] for example in examples]))  # [batch, 2]
    labels = torch.tensor([example["label"] for example in examples])
    return {"features": examples[0]["vectors"][rows], "labels": labels}  # all share them


def make_encoder(name: str) -> Encoder:
    """Return the encoder of a folder or hub name, with its cache on disk, or the one that is named ``hashed``.

    Raises:
        ValueError: there is no name.
    """
    if not name:
        raise ValueError(
            f"data.encoder={name!r} must be the folder or hub name of a sentence encoder, or hashed"
        )
    if name == "hashed":
        return HashedEncoder()
    encoder = SentenceEncoder(name)
    encoder.setting = "encoder"  # for messages
    return encoder
