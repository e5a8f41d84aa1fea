"""Metrics of modules with one or several selectors that choose between two answers."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from fedlight.modules.functional import choice_loss

STAGES = ("val", "test")


def stage_accuracies() -> nn.ModuleDict:
    """Return an accuracy for validation and one for testing."""
    return nn.ModuleDict({stage: MulticlassAccuracy(2, average="micro") for stage in STAGES})


def log_choices(
    module: Any, stage: str, logits: Tensor, labels: Tensor, of_loss: Tensor | None = None
) -> Mapping[str, Tensor]:
    """Log loss and accuracy, of several selectors each one's as well, and return which examples are decided correctly.

    ``logits`` of A and B by each of U selectors are ``(batch, U, 2)``, as are those of the loss where they are others
    (``of_loss``); ``labels``, ``(batch,)``, are 0 where A is better and 1 where B is.

    Returns:
        ``correct``, ``(batch, U)`` bool, by each selector; ``vote``, ``(batch,)`` bool, by their majority, if U is odd;
            ``log_odds``, ``(batch, U)``, of the right answer under each selector.
    """
    losses = [choice_loss(part, labels) for part in (logits if of_loss is None else of_loss).unbind(dim=1)]
    choices = logits.argmax(dim=2)  # [batch, U]
    correct = choices == labels[:, None]
    metrics = {"loss": torch.stack(losses, dim=1).mean(dim=1)}
    if len(losses) > 1:
        shares = correct.float().unbind(dim=1)
        metrics |= {f"accuracy_{name}": part for name, part in zip(module.adapter_names, shares, strict=True)}
    module.log_means(stage, metrics)
    of_a = logits[:, :, 0] - logits[:, :, 1]  # [batch, U]
    results = {"correct": correct, "log_odds": torch.where(labels[:, None] == 0, of_a, -of_a)}
    if len(losses) % 2 == 0:  # can tie
        return results
    winners = choices.mode(dim=1).values  # the choice of most selectors
    accuracy = cast(MulticlassAccuracy, module.accuracy[stage])
    accuracy.update(winners, labels)
    module.log(f"{stage}/accuracy", accuracy, prog_bar=True)
    return results | {"vote": winners == labels}
