"""What the server does with a round's combined movement."""

from abc import ABC, abstractmethod
from typing import Any

from fedlight.federation.state import State, moved


class ServerOptimizer(ABC):
    """Treats the combined movement as a step direction."""

    @abstractmethod
    def step(self, state: State, movement: State) -> State:
        """The new global state (fp32); names absent from ``movement`` do not move."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: tensors and plain values only."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027  # most keep nothing
        """Takes back what ``state_dict`` gave."""


class Average(ServerOptimizer):
    """``w <- w + lr * movement``; ``lr = 1`` is plain averaging.

    Args:
        lr: server learning rate, above 0.

    Raises:
        ValueError: ``lr`` is not above 0.

    Example:
        >>> import torch
        >>> Average(0.5).step({"w": torch.tensor([1.0])}, {"w": torch.tensor([4.0])})["w"].item()
        3.0
    """

    def __init__(self, lr: float = 1.0) -> None:
        if not lr > 0:
            raise ValueError(f"the server's lr={lr} must be above 0; 1 is plain averaging")
        self.lr = lr

    def step(self, state: State, movement: State) -> State:
        """One step."""
        return moved(state, movement, self.lr)
