"""Random transforms of a data set, drawn for each client alone.

An example may be drawn anew whenever it is read: a crop, a mask, noise. Such draws come from the global streams of the
process that reads, and would depend on what it has read before, of other clients or before a run was resumed.
"""

import random
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import get_worker_info

from fedlight.support.seeding import derive_seed


class SeededBatch(list[int]):
    """Positions of a batch, which seed the streams of a worker process when it reads them.

    Args:
        positions: of the batch.
        seed: of what reading them draws.
    """

    def __init__(self, positions: Sequence[int] = (), seed: int = 0) -> None:
        super().__init__(positions)
        self.seed = seed

    def __iter__(self) -> Iterator[int]:
        """The positions; a worker asks for them just before it reads."""
        if get_worker_info() is not None:
            seed_streams(self.seed)
        return super().__iter__()


def seeded_reading(batches: Sequence[list[int] | int], num_workers: int, *purpose: int | str) -> Iterator:
    """The batches of a visit, so that what reading them draws depends on this visit alone.

    Without workers they are read in the process that trains: its streams are seeded once, before the first batch, and the
    loop seeds them again for the visit itself.

    Args:
        batches: of a visit.
        num_workers: of the loader.
        purpose: what the seed is for: the run's seed, the round, the client.
    """
    if num_workers == 0:
        seed_streams(derive_seed(*purpose, "read"))
    for number, batch in enumerate(batches):
        seed = derive_seed(*purpose, "read", number)
        yield SeededBatch(batch, seed) if num_workers and isinstance(batch, list) else batch


def seed_streams(seed: int) -> None:
    """Seeds the global streams of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
