"""Random projection of very long vectors to a few thousand numbers, so that inner products are kept on average.

Every coordinate gets a random sign, the coordinates are dealt into as many random groups of equal size as there shall be
numbers, and each group is summed: CountSketch (M. Charikar, K. Chen, M. Farach-Colton, "Finding frequent items in data
streams", 2002; K. Clarkson, D. Woodruff, "Low rank approximation and regression in input sparsity time", STOC 2013,
https://arxiv.org/abs/1207.6365), with groups of equal size instead of independent ones. For x and y of any length and a
projection P to d numbers

    E[<P x, P y>] = <x, y>,    Var[<P x, P y>] <= (|x|^2 |y|^2 + <x, y>^2) / d,

which is the bound of a dense matrix of random signs, too; but x takes one addition per coordinate instead of d, and there
is no matrix of (coordinates x d) entries to make or to hold: an index and a sign, 5 bytes, per coordinate.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from fedlight.support.seeding import derive_seed


class RandomProjection:
    """Projects vectors that come as one tensor per name, a function of seed, names and sizes.

    Args:
        sizes: number of coordinates under each name.
        dimension: numbers that are left, at least 1.
        seed: of signs and groups.
        device: where the vectors are.

    Example:
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
        self._tables = {name: _table(size, dimension, seed, name) for name, size in sizes.items()}
        self._tables = {
            name: (order.to(device), signs.to(device)) for name, (order, signs) in self._tables.items()
        }

    def __call__(self, vectors: Mapping[str, Tensor]) -> Tensor:
        """The projections of a batch of vectors.

        Args:
            vectors: ``(batch, ...)`` under each name.

        Returns:
            ``(batch, dimension)`` fp32.
        """
        return torch.stack([self._project(name, part) for name, part in vectors.items()]).sum(dim=0)

    def _project(self, name: str, part: Tensor) -> Tensor:
        order, signs = self._tables[name]
        flat = functional.pad(part.flatten(1).float(), (0, len(order) - part[0].numel()))
        return (flat.index_select(1, order) * signs).view(len(flat), self.dimension, -1).sum(dim=2)


def _table(size: int, dimension: int, seed: int, name: str) -> tuple[Tensor, Tensor]:
    """The coordinates in the order of their groups, filled up with zeros to groups of one size, and their signs."""
    padded = dimension * math.ceil(size / dimension)
    stream = torch.Generator().manual_seed(derive_seed(seed, "projection", name))
    order = torch.randperm(padded, generator=stream).int()
    signs = torch.randint(0, 2, (padded,), generator=stream, dtype=torch.int8) * 2 - 1
    return order, signs
