"""In which order a client's examples are read: what a sampler does with a data set, done with one client's examples.

The samplers of torch are made anew over the client's examples. A sampler of the user's own making is run over the whole data
set, and each client takes its examples out of what comes, in that order.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from fedlight.datamodules.federated.seeded_reading import seed_streams
from fedlight.support.seeding import derive_seed


class Order(Protocol):
    """The order of the examples in a client's passes."""

    def readable(self, positions: np.ndarray) -> np.ndarray:
        """Those of a client's positions that are read at all."""

    def of_pass(self, positions: np.ndarray) -> int:
        """How many examples one pass over them has."""

    def passes(
        self, positions: np.ndarray, round_idx: int, generator: torch.Generator
    ) -> Iterator[Iterable[int]]:
        """Positions of one pass after the other, without end; random ones from the generator or by the round."""


class InOrder:
    """As `SequentialSampler`: by position.

    Args:
        source: length of the data set that the sampler reads, from its first example on.
    """

    def __init__(self, source: int) -> None:
        self.source = source

    def readable(self, positions: np.ndarray) -> np.ndarray:
        return np.sort(positions[positions < self.source])

    def of_pass(self, positions: np.ndarray) -> int:
        return len(positions)

    def passes(
        self, positions: np.ndarray, round_idx: int, generator: torch.Generator
    ) -> Iterator[Iterable[int]]:
        while True:
            yield positions.tolist()


class Shuffled:
    """As `RandomSampler` and `SubsetRandomSampler`: in random order, with or without replacement.

    Args:
        source: positions that the sampler reads.
        num_samples: of a pass of the sampler; a client's has its share of them.
        replacement: whether an example can come twice in a pass.
    """

    def __init__(self, source: np.ndarray, num_samples: int, replacement: bool = False) -> None:
        self.source, self.num_samples, self.replacement = source, num_samples, replacement

    def readable(self, positions: np.ndarray) -> np.ndarray:
        return positions[np.isin(positions, self.source)]

    def of_pass(self, positions: np.ndarray) -> int:
        return _share(len(positions), self.num_samples, len(self.source))

    def passes(
        self, positions: np.ndarray, round_idx: int, generator: torch.Generator
    ) -> Iterator[Iterable[int]]:
        own = RandomSampler(range(len(positions)), self.replacement, self.of_pass(positions), generator)
        while True:
            yield (int(positions[index]) for index in own)


class Weighted:
    """As `WeightedRandomSampler`: with the weights of the client's examples.

    Args:
        sampler: the user's.
    """

    def __init__(self, sampler: WeightedRandomSampler) -> None:
        self.sampler, self.num_samples = sampler, sampler.num_samples
        self.replacement = sampler.replacement

    def readable(self, positions: np.ndarray) -> np.ndarray:
        return positions[self.sampler.weights[positions].numpy() > 0]

    def of_pass(self, positions: np.ndarray) -> int:
        share = _share(len(positions), self.num_samples, len(self.sampler.weights))
        return share if self.replacement else min(share, len(positions))

    def passes(
        self, positions: np.ndarray, round_idx: int, generator: torch.Generator
    ) -> Iterator[Iterable[int]]:
        # Asked for in every visit: a project may give its sampler other weights in each epoch.
        weights, number = self.sampler.weights[positions], self.of_pass(positions)
        own = WeightedRandomSampler(weights, number, self.replacement, generator)  # type: ignore[arg-type]
        while True:
            yield (int(positions[index]) for index in own)


class Taken:
    """A client's examples out of a sampler of the user's own making, in the order in which they come.

    The sampler is told the round as Lightning tells it the epoch, and draws from seeded global streams, or from its own
    ``generator``. All clients of a round take from the same passes.

    Args:
        sampler: with a length.
        seeds: of what it draws.

    Raises:
        ValueError: it has no length, or its order cannot be had twice.
    """

    def __init__(self, sampler: Any, seeds: tuple[int, ...]) -> None:
        self.sampler, self.seeds = sampler, seeds
        self._drawn: tuple[tuple[int, int], np.ndarray] | None = None
        name = type(sampler).__name__
        if not hasattr(sampler, "__len__"):
            raise ValueError(
                f"the training loader's sampler {name} has no length: add __len__, {OWN_BATCHES}"
            )
        first, self._drawn = self._draw(0, 0), None
        if not np.array_equal(first, self._draw(0, 0)):
            raise ValueError(
                f"the training loader's sampler {name} gives another order each time, also from the same seed, so a resumed "
                f"run would read other batches: have it draw from a global stream of torch, numpy or Python, {OWN_BATCHES}"
            )

    def readable(self, positions: np.ndarray) -> np.ndarray:
        # What it draws at random may leave an example out of one pass.
        read = any(np.isin(positions, self._draw(0, number)).any() for number in range(PASSES))
        return positions if read else positions[:0]

    def of_pass(self, positions: np.ndarray) -> int:
        return int(np.isin(self._draw(0, 0), positions).sum())

    def passes(
        self, positions: np.ndarray, round_idx: int, generator: torch.Generator
    ) -> Iterator[Iterable[int]]:
        number = 0
        while True:
            drawn = self._draw(round_idx, number)
            yield drawn[np.isin(drawn, positions)].tolist()
            number += 1

    def _draw(self, round_idx: int, number: int) -> np.ndarray:
        """A pass of the sampler over the whole data set."""
        if self._drawn is None or self._drawn[0] != (round_idx, number):
            seed = derive_seed(*self.seeds, "sampler", round_idx, number)
            with seeded(seed):
                announce(self.sampler, round_idx)
                if isinstance(getattr(self.sampler, "generator", None), torch.Generator):
                    self.sampler.generator.manual_seed(seed)
                drawn = [int(index) for index in islice(self.sampler, len(self.sampler))]
            self._drawn = (round_idx, number), np.asarray(drawn, dtype=np.int64)
        return self._drawn[1]


PASSES = 100
"""Who is in none of so many passes of a sampler is never read by it."""
OWN_BATCHES = (
    "say how one client's examples are read, ByClient(clients, batch_sampler=lambda own_set: BatchSampler(...)), or give "
    "the loader shuffle=True"
)


def order_of(sampler: Any, num_examples: int, seeds: tuple[int, ...]) -> Order:
    """The order of a client's examples that a sampler stands for.

    Args:
        sampler: of the user's loader.
        num_examples: of its data set.
        seeds: of what a sampler of the user's own making draws.

    Raises:
        ValueError: the sampler cannot be taken apart by client.
    """
    kind = type(sampler)
    if kind is SequentialSampler:
        return InOrder(len(sampler.data_source))
    if kind is RandomSampler:
        return Shuffled(np.arange(len(sampler.data_source)), sampler.num_samples, sampler.replacement)
    if kind is SubsetRandomSampler:
        return Shuffled(np.asarray([int(index) for index in sampler.indices], np.int64), len(sampler))
    if kind is WeightedRandomSampler:
        if len(sampler.weights) != num_examples:
            raise ValueError(
                f"the training loader's WeightedRandomSampler has {len(sampler.weights)} weights for {num_examples} "
                "examples: give one for each"
            )
        return Weighted(sampler)
    if kind is DistributedSampler:
        if sampler.num_replicas > 1:
            raise ValueError(
                f"the training loader's DistributedSampler has num_replicas={sampler.num_replicas} and leaves out the "
                "examples of other processes, but a federated run has one process: take it out, or set num_replicas=1"
            )
        return Shuffled(np.arange(num_examples), num_examples) if sampler.shuffle else InOrder(num_examples)
    return Taken(sampler, seeds)


def announce(sampler: Any, round_idx: int) -> None:
    """Tells a sampler the round as Lightning tells it the epoch, where it listens."""
    for listener in (sampler, getattr(sampler, "sampler", None)):
        if callable(getattr(listener, "set_epoch", None)):
            listener.set_epoch(round_idx)  # type: ignore[union-attr]


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Has every global random stream start from a seed while its body runs; then they are as they were."""
    with isolate_rng():
        seed_streams(seed)
        yield


def _share(number: int, num_samples: int, source: int) -> int:
    """Of the ``num_samples`` of a pass over ``source`` examples, those of a client that has ``number`` of these."""
    return max(1, round(num_samples * number / source))
