"""The mean loss of each client's validation examples, in one pass over the examples of all clients.

FedBiscuit groups clients by these losses. Scoring 10,000 clients one after the other would take as many small loops;
here their examples share full batches, sorted by length, and are told apart afterwards.
"""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import lightning as L
import numpy as np
import torch
from torch import Tensor

from fedlight.callbacks.loop.data_hooks import ready
from fedlight.support.torch_parts import eval_mode


@runtime_checkable
class LossPerExample(Protocol):
    """What is needed of the module."""

    def example_losses(self, batch: Any) -> Tensor:
        """One loss per example, ``(batch,)``."""


@runtime_checkable
class ValidatesByClient(Protocol):
    """What is needed of the datamodule.

    Attributes:
        val_client_indices: client id -> positions of its examples in the validation loader.
    """

    val_client_indices: Mapping[str, np.ndarray] | None

    def val_dataloader(self) -> Any:
        """The validation examples of all clients, always in the same order."""


def check_client_losses(module: L.LightningModule, data: object) -> None:
    """Raises ``ValueError`` where there is no loss per example, or no validation example by client."""
    if not isinstance(module, LossPerExample):
        raise ValueError(
            f"{type(module).__name__} has no method example_losses(batch) -> (batch,), by which clients are scored: add "
            "it, or take an algorithm that does not group clients"
        )
    if not isinstance(data, ValidatesByClient) or data.val_client_indices is None:
        raise ValueError(
            "the datamodule has no validation examples by client, on which they are scored: set data.val_share "
            "above 0 and no data.val_source"
        )


def client_losses(module: L.LightningModule, data: ValidatesByClient) -> dict[str, float]:
    """Mean loss of each client's validation examples, in evaluation mode and without gradients."""
    assert isinstance(module, LossPerExample)
    with torch.no_grad(), eval_mode(module):
        found = [
            module.example_losses(ready(module, batch)).double().cpu() for batch in data.val_dataloader()
        ]
    losses = torch.cat(found).numpy()
    assert data.val_client_indices is not None
    return mean_by_client(losses, data.val_client_indices)


def mean_by_client(values: np.ndarray, indices: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Mean of each client's values.

    Args:
        values: one per example, ``(examples,)``.
        indices: client id -> its examples.

    Example:
        >>> mean_by_client(np.array([1.0, 2.0, 6.0]), {"u": np.array([0, 2]), "v": np.array([1])})
        {'u': 3.5, 'v': 2.0}
    """
    return {client: float(values[own].mean()) for client, own in indices.items()}
