"""What is done in a visit while it is under way: steps, losses, learning rate, time."""

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedlight.federation.client import Visit, Work


class LocalWork:
    """The work of the visit under way.

    Args:
        lr: learning rate at its beginning.
    """

    def __init__(self, lr: float) -> None:
        self._lr = lr
        self._steps = 0
        self._backward_since_step = False
        self._losses: list[Tensor] = []
        self._started = time.perf_counter()

    def step(self, lr: float) -> None:
        """Counts an optimizer step; at the visit's end the scheduler may be ahead of its learning rate."""
        self._steps += 1
        self._backward_since_step = False
        self._lr = lr

    def backward(self) -> None:
        """Notes gradients that no optimizer step has used yet."""
        self._backward_since_step = True

    def refuse_unused_gradients(self, visit: Visit) -> None:
        """Raises ``ValueError`` where the visit ended between a backward pass and the step that was to use it."""
        if self._backward_since_step:
            raise ValueError(
                f"the visit to client {visit.client_id} ended after {visit.num_batches} batches with gradients that no "
                "optimizer step has used: training_step makes one step of several batches, so set federated.local_steps to "
                "a multiple of them"
            )

    def add_loss(self, outputs: Any) -> None:
        """Takes the loss of what a training step gave, where there is one."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            self._losses.append(loss.detach())

    def done(self) -> Work:
        """All of it, at the end of the visit."""
        mean_loss = torch.stack(self._losses).mean().item() if self._losses else float("nan")
        return Work(self._steps, self._lr, mean_loss, time.perf_counter() - self._started)
