"""How a round's movements become one: a running sum, so memory does not grow with the cohort."""

from typing import Literal, Protocol

from fedlight.federation.client import Update
from fedlight.federation.state import State


class Aggregation(Protocol):
    """Takes the updates of one round, in any order, and gives their combined movement."""

    def add(self, update: Update) -> None:
        """Takes one client's update; nothing of it needs to be kept afterwards."""

    def result(self) -> State:
        """The combined movement; a name that no client sent is absent, and so does not move."""


class WeightedSum:
    """``scale * sum(w_m * delta_m) / divisor``, tensor by tensor over the clients that sent it.

    Args:
        divide_by: ``weight`` (sum of the weights), ``count`` (number of updates) or ``one``.
        scale: a constant factor, such as the number of clients.

    Example:
        >>> import torch
        >>> mean = WeightedSum("weight")
        >>> mean.add(Update("a", {"w": torch.tensor([1.0])}, weight=1.0))
        >>> mean.add(Update("b", {"w": torch.tensor([4.0])}, weight=2.0))
        >>> mean.result()["w"].item()
        3.0
    """

    def __init__(self, divide_by: Literal["weight", "count", "one"], scale: float = 1.0) -> None:
        self.divide_by = divide_by
        self.scale = scale
        self._sum: State = {}
        self._divisor: dict[str, float] = {}

    def add(self, update: Update) -> None:
        """Adds ``weight * movement`` to the running sum."""
        step = {"weight": update.weight, "count": 1.0, "one": 0.0}[self.divide_by]
        for name, value in update.movement.items():
            if name in self._sum:
                self._sum[name].add_(value, alpha=update.weight)
            else:
                self._sum[name] = value * update.weight
                self._divisor[name] = 1.0 if self.divide_by == "one" else 0.0
            self._divisor[name] += step

    def result(self) -> State:
        """The combined movement in fp64."""
        return {name: value * (self.scale / self._divisor[name]) for name, value in self._sum.items()}
