"""A client whose training diverged: what it trained holds NaN or Inf, and its work of the round is left out."""

from collections.abc import Mapping

from torch import Tensor

DIVERGED = "diverged"
"""Why such a client did not take part, beside the reasons of the virtual clock."""


class Diverged(ValueError):
    """A client's training has given something that is not finite."""


def refuse_not_finite(state: Mapping[str, Tensor], what: str) -> None:
    """Raises :class:`Diverged` for a tensor with NaN or Inf.

    Args:
        state: of a client.
        what: it is, as an error calls it.

    Example:
        >>> import torch
        >>> refuse_not_finite({"w": torch.tensor([1.0, float("nan")])}, "the trained")
        Traceback (most recent call last):
        fedlight.federation.divergence.Diverged: the trained w is not finite
    """
    for name, value in state.items():
        if not value.isfinite().all():
            raise Diverged(f"{what} {name} is not finite")
