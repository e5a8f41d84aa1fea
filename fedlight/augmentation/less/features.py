"""Gradient features of LESS: an example's effect on the weights, projected to a few thousand numbers.

M. Xia et al., "LESS: Selecting Influential Data for Targeted Instruction Tuning", ICML 2024,
https://arxiv.org/abs/2402.04333. The feature of a training example is the step that Adam would take on it alone, from the
moments m and v at a checkpoint (section 2):

    Gamma = m' / sqrt(v' + eps),  m' = (b1 m + (1 - b1) g) / (1 - b1^t),  v' = (b2 v + (1 - b2) g^2) / (1 - b2^t),

t being the step that the example would be. The feature of a target example is its gradient g. Both are projected at
random, and the influence of one on the other is their cosine (eq. 3).

Deviation: the paper projects with a dense matrix of random signs, here the projection is sparse. Every coordinate gets a
random sign, coordinates are dealt into random groups of equal size, as many as the projection has numbers, and each group
is summed: CountSketch (M. Charikar, K. Chen, M. Farach-Colton, "Finding frequent items in data streams", 2002; K. Clarkson,
D. Woodruff, "Low rank approximation and regression in input sparsity time", STOC 2013, https://arxiv.org/abs/1207.6365),
with groups of equal size instead of independent ones. For x and y of any length and a projection P to d numbers

    E[<P x, P y>] = <x, y>,    Var[<P x, P y>] <= (|x|^2 |y|^2 + <x, y>^2) / d,

which is also the bound of the dense matrix. But x takes one addition per coordinate instead of d, and in place of a matrix
of (coordinates x d) entries there are an index and a sign, 5 bytes, per coordinate.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fedlight.augmentation.less.example_gradients import example_gradients
from fedlight.modules.sft import SFTModule
from fedlight.support.seeding import derive_seed
from fedlight.support.torch_parts import eval_mode

BETAS = (0.9, 0.999)  # b1 and b2 of Adam
EPSILON = 1e-8


class RandomProjection:
    """Projection of vectors of some ``sizes`` by name to ``dimension`` numbers, a function of seed, names and sizes.

    Examples:
        >>> project = RandomProjection({"a": 4000, "b": 1000}, dimension=1000, seed=0)
        >>> x = {"a": torch.ones(1, 4000), "b": torch.zeros(1, 1000)}
        >>> y = {"a": torch.ones(1, 4000), "b": torch.ones(1, 1000)}
        >>> project(x).shape, (project(x) * project(y)).sum().item()  # 4000 on average, give or take 190
        (torch.Size([1, 1000]), 4160.0)
    """

    def __init__(
        self, sizes: Mapping[str, int], dimension: int, seed: int, device: torch.device | str = "cpu"
    ) -> None:
        self.dimension = dimension
        self._tables = {
            name: [part.to(device) for part in _make_table(size, dimension, seed, name)]
            for name, size in sizes.items()
        }

    def __call__(self, vectors: Mapping[str, Tensor]) -> Tensor:
        """Return the projections of a batch, ``(batch, dimension)`` fp32, of ``(batch, ...)`` under each name."""
        return torch.stack([self._project(name, part) for name, part in vectors.items()]).sum(dim=0)

    def _project(self, name: str, part: Tensor) -> Tensor:
        order, signs = self._tables[name]
        # [batch, coordinates], padded to groups of equal size.
        flat = functional.pad(part.flatten(1).float(), (0, len(order) - part[0].numel()))
        return (flat.index_select(1, order) * signs).view(len(flat), self.dimension, -1).sum(dim=2)


def _make_table(size: int, dimension: int, seed: int, name: str) -> tuple[Tensor, Tensor]:
    """Return the coordinates in the order of their groups, padded to groups of equal size, and their signs."""
    padded = dimension * math.ceil(size / dimension)
    # On the CPU, since the generator of a GPU draws other numbers.
    stream = torch.Generator().manual_seed(derive_seed(seed, "projection", name))
    order = torch.randperm(padded, generator=stream).int()  # 4 of the 5 bytes of a coordinate
    signs = torch.randint(0, 2, (padded,), generator=stream, dtype=torch.int8) * 2 - 1
    return order, signs


class Moments(NamedTuple):
    """State of Adam after some steps."""

    # running mean of the gradients by name of the weight, not corrected for its start at 0
    first: Mapping[str, Tensor]
    second: Mapping[str, Tensor]  # running mean of their squares
    steps: int  # steps taken


def adam_direction(gradient: Tensor, first: Tensor, second: Tensor, steps: int) -> Tensor:
    """Return Adam's next step divided by the learning rate, for each gradient of a batch, ``(batch, ...)``, alone.

    ``first`` and ``second``, ``(...)``, are the running means of gradients and of their squares after so many steps.

    Examples:
        >>> nothing = torch.zeros(2)
        >>> adam_direction(torch.tensor([[3.0, -0.2]]), nothing, nothing, steps=0)  # the first step: signs
        tensor([[ 1.0000, -1.0000]])
        >>> adam_direction(torch.tensor([[0.0]]), torch.tensor([0.2]), torch.tensor([0.004]), steps=1)
        tensor([[0.6701]])
    """
    (b1, b2), t = BETAS, steps + 1
    mean = (b1 * first + (1 - b1) * gradient) / (1 - b1**t)  # m'
    square = (b2 * second + (1 - b2) * gradient**2) / (1 - b2**t)  # v'
    return mean / (square + EPSILON).sqrt()  # Gamma; epsilon is inside the root, as in the paper


def gradient_features(
    module: SFTModule,
    batch: dict[str, Tensor],
    project: Callable[[Mapping[str, Tensor]], Tensor],
    moments: Moments | None = None,
    way: str = "layers",
) -> Tensor:
    """Return each example's projected gradient without dropout, or with ``moments`` its projected step of Adam.

    The features are ``(batch, dimension)`` fp32. The module is configured and has one adapter; `RandomProjection` projects.
    """
    with eval_mode(module):
        by_name = example_gradients(module, batch, way)
    if moments is not None:
        for name, gradient in by_name.items():
            by_name[name] = adam_direction(gradient, moments.first[name], moments.second[name], moments.steps)
    return project(by_name)


def influence(features: Tensor, targets: Tensor) -> Tensor:
    """Return the cosine of every example's feature with every target's, ``(examples, targets)``; 0 where one of them is 0.

    Examples:
        >>> influence(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([[2.0, 0.0]])).tolist()
        [[0.6000000238418579], [0.0]]
    """
    return functional.normalize(features, dim=1) @ functional.normalize(targets, dim=1).T  # 0 stays 0
