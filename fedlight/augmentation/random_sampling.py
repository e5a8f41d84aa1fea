"""Random sampling, the simplest baseline: each client gets public rows drawn uniformly.

Wang et al., "Federated Instruction Tuning of LLMs with Domain Coverage Augmentation" (FedDCA),
https://arxiv.org/abs/2409.20135, section 5.1.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from fedlight.datamodules.instructions.augmentation import Added, Augmentation
from fedlight.support.seeding import derive_seed
from fedlight.support.types import Fields


class RandomSampling(Augmentation):
    """Draws of ``number`` public rows for each client, none twice for one client, without scores.

    Args:
        number: rows for each client, >= 1; with fewer public rows each client gets them all.

    Examples:
        >>> public = [{"prompt": "x", "response": str(i)} for i in range(4)]
        >>> added = RandomSampling(number=3).augment({"c0": [], "c1": []}, public, seed=0)
        >>> sorted(row.row for row in added["c0"])
        [0, 1, 2]
    """

    def augment(
        self, clients: Mapping[str, Sequence[Fields]], public: Sequence[Fields], seed: int
    ) -> dict[str, list[Added]]:
        return {client: self._draw(public, derive_seed(seed, "random rows", client)) for client in clients}

    def _draw(self, public: Sequence[Fields], seed: int) -> list[Added]:
        rows = np.random.default_rng(seed).permutation(len(public))[: self.number]  # no row twice
        return [Added(public[row], int(row)) for row in rows]
