"""The loss of one batch, as the module gave it."""

from collections.abc import Mapping
from typing import Any

import lightning as L
from torch import Tensor


def step_loss(trainer: L.Trainer, outputs: Any) -> Tensor | None:
    """The loss that ``training_step`` returned, or None where there is none, as under manual optimization there may be.

    Args:
        trainer: that has divided it by its ``accumulate_grad_batches``, which is taken back here.
        outputs: of ``on_train_batch_end``.
    """
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    return loss.detach() * trainer.accumulate_grad_batches if isinstance(loss, Tensor) else None
