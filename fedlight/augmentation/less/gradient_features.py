"""Gradient features of LESS: what an example would do to the weights, in a few thousand numbers.

M. Xia et al., "LESS: Selecting Influential Data for Targeted Instruction Tuning", ICML 2024,
https://arxiv.org/abs/2402.04333. An example to be learned from counts by the step that Adam would take on it alone, from
the moments m and v at a checkpoint (section 2):

    Gamma = m' / sqrt(v' + eps),  m' = (b1 m + (1 - b1) g) / (1 - b1^t),  v' = (b2 v + (1 - b2) g^2) / (1 - b2^t),

t being the step that the example would be; an example to be good at counts by its plain gradient g. Both are projected at
random. The influence of the one on the other is the cosine of the two (eq. 3). Deviation: the projection is sparse, see
`fedlight.augmentation.less.random_projection`; the paper's is a dense matrix of random signs, with the same bound on
the variance.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional

from fedlight.augmentation.less.example_gradients import example_gradients
from fedlight.modules.sft import SFTModule
from fedlight.support.torch_parts import eval_mode

BETAS = (0.9, 0.999)
EPSILON = 1e-8


class Moments(NamedTuple):
    """What Adam remembers after some steps."""

    first: Mapping[str, Tensor]
    """Running mean of the gradients by name of the weight, not corrected for its start at 0."""
    second: Mapping[str, Tensor]
    """The same of their squares."""
    steps: int
    """Steps taken."""


def adam_direction(gradient: Tensor, first: Tensor, second: Tensor, steps: int) -> Tensor:
    """What Adam's next step would be divided by the learning rate, were it taken on each gradient alone.

    As in the paper, epsilon stands inside the root.

    Args:
        gradient: ``(batch, ...)``.
        first: ``(...)``, running mean of the gradients.
        second: ``(...)``, running mean of their squares.
        steps: taken so far.

    Returns:
        ``(batch, ...)``.

    Example:
        >>> import torch
        >>> nothing = torch.zeros(2)
        >>> adam_direction(torch.tensor([[3.0, -0.2]]), nothing, nothing, steps=0)  # the first step: signs
        tensor([[ 1.0000, -1.0000]])
        >>> adam_direction(torch.tensor([[0.0]]), torch.tensor([0.2]), torch.tensor([0.004]), steps=1)
        tensor([[0.6701]])
    """
    (b1, b2), t = BETAS, steps + 1
    mean = (b1 * first + (1 - b1) * gradient) / (1 - b1**t)
    square = (b2 * second + (1 - b2) * gradient**2) / (1 - b2**t)
    return mean / (square + EPSILON).sqrt()


def gradient_features(
    module: SFTModule,
    batch: dict[str, Tensor],
    project: Callable[[Mapping[str, Tensor]], Tensor],
    moments: Moments | None = None,
    way: str = "layers",
) -> Tensor:
    """The projected gradient of each example without dropout, or with ``moments`` its projected step of Adam.

    Args:
        module: configured, with one adapter.
        batch: ``(batch, tokens)`` each; see `SFTModule`.
        project: such as `RandomProjection`.
        moments: of Adam.
        way: to the gradients; see `example_gradients`.

    Returns:
        ``(batch, dimension)`` fp32.
    """
    with eval_mode(module):
        found = example_gradients(module, batch, way)
    if moments is not None:
        for name, gradient in found.items():
            found[name] = adam_direction(gradient, moments.first[name], moments.second[name], moments.steps)
    return project(found)


def influence(features: Tensor, targets: Tensor) -> Tensor:
    """Cosine of every example's feature with every target's; 0 where one of the two is 0.

    Args:
        features: ``(examples, dimension)``.
        targets: ``(targets, dimension)``.

    Returns:
        ``(examples, targets)``, in [-1, 1].

    Example:
        >>> import torch
        >>> influence(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([[2.0, 0.0]])).tolist()
        [[0.6000000238418579], [0.0]]
    """
    return functional.normalize(features, dim=1) @ functional.normalize(targets, dim=1).T
