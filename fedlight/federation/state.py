"""Federated state: named tensors on the CPU, and their arithmetic in a round.

Parameters are fp32, on the wire as well. Movements (trained minus received) are fp64, so one client with weight 1 gives back
its own parameters bit for bit; a number below 2^-29 of the other one comes back to within 2^-53 of the larger.
"""

import math
from collections.abc import Mapping

from torch import Tensor, aminmax, float32, float64, no_grad

State = dict[str, Tensor]
"""Parameter name -> CPU tensor; a name that is absent was not sent."""


def read(parameters: Mapping[str, Tensor]) -> State:
    """Return a detached fp32 copy on the CPU, which later training cannot change."""
    return {name: p.detach().to("cpu", float32, copy=True) for name, p in parameters.items()}


@no_grad()
def write(state: State, parameters: Mapping[str, Tensor]) -> None:
    """Copy ``state`` into ``parameters`` in place, cast to their type and device; other parameters stay."""
    for name, value in state.items():
        parameters[name].copy_(value)


def movement(received: State, trained: State) -> State:
    """Return the movement of each trained tensor, ``trained - received``, in fp64; from 0 where none was received."""
    # In fp64 the difference of two fp32 numbers is exact where neither is below 2^-29 of the other.
    return {name: value.to(float64, copy=True).sub_(received.get(name, 0)) for name, value in trained.items()}


def moved(state: State, by: State, scale: float = 1.0) -> State:
    """Return ``state + scale * by``, taken in fp64 and rounded to fp32 once; names absent from ``by`` stay as they are."""
    return {
        name: value.to(float64).add_(by[name], alpha=scale).to(float32) if name in by else value
        for name, value in state.items()
    }


DIVERGED = "diverged"
"""Reason why a client whose training diverged did not take part, beside those of the virtual clock."""


class Diverged(ValueError):
    """Training of a client that gave NaN or infinity; its work of the round is left out."""


def refuse_not_finite(state: Mapping[str, Tensor], what: str) -> None:
    """Raise `Diverged` for a tensor with NaN or infinity; ``what`` names the state in the error.

    Examples:
        >>> import torch
        >>> refuse_not_finite({"w": torch.tensor([1.0, float("nan")])}, "the trained")
        Traceback (most recent call last):
        fedlight.federation.state.Diverged: the trained w is not finite
    """
    # A sum with a term that is not finite is not finite; where a sum of finite numbers overflows, each tensor is looked at.
    if all(value.dtype in (float32, float64) for value in state.values()) and math.isfinite(
        sum(value.sum().item() for value in state.values())
    ):
        return
    for name, value in state.items():
        if not is_finite(value):
            raise Diverged(f"{what} {name} is not finite")


def is_finite(value: Tensor) -> bool:
    """Return whether a tensor has neither NaN nor infinity.

    Examples:
        >>> import torch
        >>> is_finite(torch.tensor([1.0, -2.0])), is_finite(torch.tensor([1.0, float("nan"), 2.0]))
        (True, False)
    """
    if value.dtype not in (float32, float64) or not value.numel():
        return bool(value.isfinite().all())
    least, most = aminmax(value)  # both NaN where there is one; a tenth of the time of isfinite()
    return math.isfinite(least.item()) and math.isfinite(most.item())
