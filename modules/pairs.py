"""What modules that learn from pairs have in common: a chosen and a rejected response, which of them comes out on top."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedlight.modules.functional import IGNORED
from fedlight.modules.language.language_model import Batch, LanguageModule


class PairModule(LanguageModule):
    """Learns from batches with ``chosen`` and ``rejected``. A subclass gives `example_metrics`.

    Attributes:
        accuracy_name: the metric that is 1 where a pair is decided rightly.
    """

    accuracy_name = "accuracy"
    batch_form: ClassVar[Mapping[str, int]] = {"chosen": 0, "rejected": 0}
    reads = "pairs of answers: data=PreferenceDataModule with view=dpo"

    def example_losses(self, batch: Batch) -> Tensor:
        """Loss of each pair, ``(batch,)``."""
        return self.example_metrics(batch)["loss"]

    def example_metrics(self, batch: Batch) -> dict[str, Tensor]:
        """What is logged, one value per pair, ``(batch,)`` each; ``loss`` and the accuracy are among it."""
        raise NotImplementedError(f"{type(self).__name__} has no loss: use DPOModule or RewardModule")

    def validation_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Logs the means; gives ``correct``, ``(batch, 1)``, and ``vote``, ``(batch,)``: is the pair decided rightly."""
        return self._evaluate("val", batch)

    def test_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """As :meth:`validation_step`."""
        return self._evaluate("test", batch)

    def _evaluate(self, stage: str, batch: Batch) -> dict[str, Tensor]:
        metrics = self.example_metrics(batch)
        self.log_means(stage, metrics)
        correct = metrics[self.accuracy_name] == 1
        return {"correct": correct[:, None], "vote": correct}


def join(first: dict[str, Tensor], second: dict[str, Tensor]) -> dict[str, Tensor]:
    """One batch of both, padded on the right to the longer: ``(2 * batch, tokens)``.

    Example:
        >>> one = {"input_ids": torch.tensor([[5, 6]]), "labels": torch.tensor([[-100, 6]])}
        >>> two = {"input_ids": torch.tensor([[7]]), "labels": torch.tensor([[7]])}
        >>> {name: part.tolist() for name, part in join(one, two).items()}
        {'input_ids': [[5, 6], [7, 0]], 'labels': [[-100, 6], [7, -100]]}
    """
    return {name: _stack([first[name], second[name]], IGNORED if name == "labels" else 0) for name in first}


def _stack(parts: Sequence[Tensor], value: int) -> Tensor:
    width = max(part.shape[1] for part in parts)
    return torch.cat([pad(part, (0, width - part.shape[1]), value=value) for part in parts])
