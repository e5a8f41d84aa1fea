"""A batch outside of Lightning's loops, made ready as inside of them."""

from typing import Any

import lightning as L
import torch


def ready(module: L.LightningModule, batch: Any, device: torch.device | None = None) -> Any:
    """What a step of the module is given for a batch of a loader.

    The hooks ``on_before_batch_transfer``, ``transfer_batch_to_device`` and ``on_after_batch_transfer`` are those of the
    trainer's datamodule or of the module, as Lightning chooses between them.

    Args:
        module: that a trainer runs.
        batch: as a loader gives it.
        device: where it is to be; the module's if not given.
    """
    batch = module.trainer.precision_plugin.convert_input(batch)
    return module._apply_batch_transfer_handler(module._on_before_batch_transfer(batch), device)
