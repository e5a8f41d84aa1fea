"""MeZO: steps from differences of losses, for a client that can hold inference but not backpropagation.

Malladi et al., "Fine-Tuning Language Models with Just Forward Passes", NeurIPS 2023, https://arxiv.org/abs/2305.17333,
Definition 1 and Algorithm 1. With a loss L on a batch, trained parameters w of d numbers and z ~ N(0, I_d):

    g  = (L(w + eps z) - L(w - eps z)) / (2 eps)      two forward passes, no graph
    w <- w - lr * (g z + weight_decay * w)            plain SGD; no gradient and no moment is kept

The mean over n directions z_k of g_k z_k in a step is n-SPSA (Definition 1), and FwdLLM's averaged perturbations: Xu et al.,
"FwdLLM: Efficient Federated Finetuning of Large Language Models with Perturbed Inferences", USENIX ATC 2024,
https://arxiv.org/abs/2308.13894. FwdLLM's pacing (how n grows) and its choice of directions are not here.

With eps to 0 and u the gradient, E[g z] = u and E|g z|^2 = (d + 2) |u|^2 (Lemma 2 has d, for directions on a sphere), so
the variance of a step is (d + 1) / n times its squared mean. `ZerothOrder.forward_weight` makes up for that where other
clients of the round backpropagate. Of two unbiased movements over K steps whose variances are v and v + (d + 1) / (n K), in
units of the squared mean, inverse variance gives the second ``v / (v + (d + 1) / (n K))`` times the weight of the first.

By how much slower the loss falls than under SGD follows from the effective rank of its Hessian (Theorem 1), which in
fine-tuning is far below d.

Deviation: the paper walks to w + eps z, w - eps z and w by three additions in place, which do not give w back in floating
point, so a model drifts by roundings. Here the parameters are perturbed from a copy, which lives during a step's passes and
whose bytes are counted (`fedlight.devices.memory`). For an adapter that is a small part of the memory of inference; for a
model that is trained as a whole it doubles its weights.

Directions are never stored: z of a parameter is a function of a key and the parameter's name, and is drawn anew, parameter
by parameter, whenever it is needed, by Philox (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011,
https://doi.org/10.1145/2063384.2063405) and numpy's ziggurat on the CPU.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedlight.support.checks import Checked, check_range, refuse_below

Key = tuple[int | str, ...]
"""Purpose of a direction, from general to special, from which all of its numbers follow."""


class ZerothOrder(Checked):
    """Settings of forward-only training: ``federated.forward``.

    The learning rate is that of the module's optimizer, with its schedule, times ``lr_scale``; the optimizer's moments and
    weight decay play no part.

    Args:
        eps: size of a perturbation, above 0. Too large a one measures the curvature, too small a one the rounding of losses.
        perturbations: directions that are averaged in a step, at least 1; each costs two forward passes.
        lr_scale: factor on the optimizer's learning rate, above 0. A step is about ``sqrt(d / perturbations)`` times as long
            as one of plain SGD, so where one run has both kinds of clients, these need a smaller rate.
        weight_decay: as of plain SGD, at least 0.
        forward_weight: factor in [0, 1] on the weight of a forward-only visit in the average, see the equations above; 1
            weights it as any other. With ``weighting="unbiased"`` a smaller one also makes the round's movement smaller.
        only_where_needed: whether clients train by backpropagation where it fits their device; it needs a fleet.

    Raises:
        ValueError: a setting is out of its range.
    """

    def __init__(
        self,
        eps: float = 1e-3,
        perturbations: int = 1,
        lr_scale: float = 1.0,
        weight_decay: float = 0.0,
        forward_weight: float = 1.0,
        only_where_needed: bool = False,
    ) -> None:
        infinite = float("inf")
        for name, value in (("eps", eps), ("lr_scale", lr_scale)):
            if not 0 < value < infinite:
                raise ValueError(f"{name}={value} must be above 0")
        refuse_below(1, perturbations=perturbations)
        if not 0 <= weight_decay < infinite:
            raise ValueError(f"weight_decay={weight_decay} must be at least 0")
        check_range("forward_weight", forward_weight, 0, 1)
        if not (forward_weight or only_where_needed):
            raise ValueError(f"forward_weight={forward_weight} must be above 0, or no client counts")
        self.only_where_needed = only_where_needed
        self.train: Literal["forward", "auto"] = "auto" if only_where_needed else "forward"
        self.eps, self.perturbations, self.lr_scale = eps, perturbations, lr_scale
        self.weight_decay, self.forward_weight = weight_decay, forward_weight


def direction(key: Key, name: str, shape: Sequence[int]) -> Tensor:
    """Return the standard normal numbers of a direction at the parameter ``name``, fp32 of ``shape`` on the CPU.

    Examples:
        >>> z = direction((0, "visit", "a"), "weight", (2, 3))
        >>> torch.equal(z, direction((0, "visit", "a"), "weight", (2, 3)))
        True
        >>> torch.equal(z, direction((0, "visit", "b"), "weight", (2, 3)))
        False
    """
    # Types count: 1 and "1" are different keys.
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in (*key, name))
    number = int.from_bytes(blake2b(text.encode(), digest_size=16).digest(), "little")
    # Torch's draws differ in their last bits between processors with other vector instructions, and devices.
    drawn = np.random.Generator(np.random.Philox(key=number)).standard_normal(tuple(shape), dtype=np.float32)
    return torch.from_numpy(np.asarray(drawn))


def perturb(parameters: Mapping[str, Tensor], at: Mapping[str, Tensor], key: Key, size: float) -> None:
    """Set each parameter to ``at + size * z``, in place; one parameter's z exists at a time."""
    for name, parameter in parameters.items():
        z = direction(key, name, parameter.shape).to(parameter)
        # Rounded twice: a fused operation would give other bits on other processors.
        parameter.copy_(z.mul_(size).add_(at[name]))


def estimate(name: str, like: Tensor, slopes: Sequence[tuple[Key, float]]) -> Tensor:
    """Return the sum over directions of ``slope * z`` at one parameter, of the type and on the device of ``like``.

    Examples:
        >>> z, like = direction(("a",), "w", (2,)), torch.zeros(2)
        >>> torch.equal(estimate("w", like, [(("a",), 3.0)]), 3.0 * z)
        True
    """
    (first, slope), *others = slopes
    total = direction(first, name, like.shape).to(like).mul_(slope)
    for key, slope in others:
        total.add_(direction(key, name, like.shape).to(like).mul_(slope))
    return total
