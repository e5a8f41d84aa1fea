"""Base class of modules that learn from preference pairs, and the batch of both responses."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedlight.modules.functional import IGNORED
from fedlight.modules.language.module import Batch, LanguageModule


class PairModule(LanguageModule):
    """Module whose batches have ``chosen`` and ``rejected``; a subclass defines `example_metrics`.

    Attributes:
        accuracy_name: name of the metric that is 1 where a pair is decided correctly.
    """

    accuracy_name = "accuracy"
    batch_form: ClassVar[Mapping[str, int]] = {"chosen": 0, "rejected": 0}
    data_hint = "pairs of answers: data=PreferenceDataModule with view=dpo"

    def example_losses(self, batch: Batch) -> Tensor:
        """Return the loss of each pair, ``(batch,)``."""
        self._check_batch(batch)
        return self.example_metrics(batch)["loss"]

    def example_metrics(self, batch: Batch) -> dict[str, Tensor]:
        """Return the logged metrics, one value per pair, ``(batch,)`` each: ``loss``, the accuracy and others."""
        raise NotImplementedError(f"{type(self).__name__} has no loss: use DPOModule or RewardModule")

    def evaluate_batch(self, stage: str, batch: Batch) -> dict[str, Tensor]:
        """Log the means; return whether each pair is decided correctly, ``correct (batch, 1)`` and ``vote (batch,)``."""
        metrics = self.evaluated(batch)
        self.log_means(stage, metrics)
        correct = metrics[self.accuracy_name] == 1
        return {"correct": correct[:, None], "vote": correct}


def join(first: dict[str, Tensor], second: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return both batches as one of ``(2 * batch, tokens)``, padded on the right to the longer one.

    Examples:
        >>> one = {"input_ids": torch.tensor([[5, 6]]), "labels": torch.tensor([[-100, 6]])}
        >>> two = {"input_ids": torch.tensor([[7]]), "labels": torch.tensor([[7]])}
        >>> {name: part.tolist() for name, part in join(one, two).items()}
        {'input_ids': [[5, 6], [7, 0]], 'labels': [[-100, 6], [7, -100]]}
    """
    joined = {}
    for name in first:
        sides, filler = (first[name], second[name]), IGNORED if name == "labels" else 0
        width = max(side.shape[1] for side in sides)
        joined[name] = torch.cat([pad(side, (0, width - side.shape[1]), value=filler) for side in sides])
    return joined
