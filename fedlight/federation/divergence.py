"""A client whose training diverged: what it trained holds NaN or Inf, and its work of the round is left out."""

from collections.abc import Mapping

from torch import Tensor

DIVERGED = "diverged"
"""Reason why a client whose training diverged did not take part, beside those of the virtual clock."""


class Diverged(ValueError):
    """Training of a client that gave NaN or infinity; its work of the round is left out."""


def refuse_not_finite(state: Mapping[str, Tensor], what: str) -> None:
    """Raise :class:`Diverged` for a tensor with NaN or infinity; ``what`` names the state in the error.

    Example:
        >>> import torch
        >>> refuse_not_finite({"w": torch.tensor([1.0, float("nan")])}, "the trained")
        Traceback (most recent call last):
        fedlight.federation.divergence.Diverged: the trained w is not finite
    """
    for name, value in state.items():
        if not value.isfinite().all():
            raise Diverged(f"{what} {name} is not finite")
