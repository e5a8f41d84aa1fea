"""Orders of a client's examples, one for each kind of sampler in the user's loader.

torch's samplers are made anew over the client's examples. A sampler of the user's own class runs over the whole data set,
and each client takes its own examples from that pass, in that order.
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

from fedlight.support.seeding import derive_seed
from fedlight.support.torch_parts import seed_streams

Passes = Iterator[Iterable[int]]
PASSES = 100
"""A sampler that leaves out all of a client's examples in this many passes never reads them."""
OWN_BATCHES = (
    "set how one client's examples are read, ByClient(clients, batch_sampler=lambda own_set: BatchSampler(...)), or give "
    "the loader shuffle=True"
)


class Order(Protocol):
    """Order of the examples in a client's passes."""

    def readable(self, positions: np.ndarray) -> np.ndarray:
        """Return the client's positions that the sampler can read."""

    def pass_length(self, positions: np.ndarray) -> int:
        """Return the number of examples in one pass over readable positions."""

    def passes(self, positions: np.ndarray, round_idx: int, generator: torch.Generator) -> Passes:
        """Yield the positions of one pass after another, without end; random ones from the generator or by the round."""


class SequentialOrder:
    """Order of a `SequentialSampler` over the first ``num_examples`` of the data set: by position."""

    def __init__(self, num_examples: int) -> None:
        self.num_examples = num_examples

    def readable(self, positions: np.ndarray) -> np.ndarray:
        return np.sort(positions[positions < self.num_examples])  # its source may be shorter

    def pass_length(self, positions: np.ndarray) -> int:
        return len(positions)

    def passes(self, positions: np.ndarray, round_idx: int, generator: torch.Generator) -> Passes:
        while True:
            yield positions.tolist()


class RandomOrder:
    """Order of a `RandomSampler` or `SubsetRandomSampler` over the positions in ``source``, with or without replacement.

    A client gets its share of the ``num_samples`` examples in a pass of the sampler.
    """

    def __init__(self, source: np.ndarray, num_samples: int, replacement: bool = False) -> None:
        self.source, self.num_samples, self.replacement = source, num_samples, replacement

    def readable(self, positions: np.ndarray) -> np.ndarray:
        return positions[np.isin(positions, self.source)]

    def pass_length(self, positions: np.ndarray) -> int:
        return _share(self.num_samples, len(positions), len(self.source))

    def passes(self, positions: np.ndarray, round_idx: int, generator: torch.Generator) -> Passes:
        order = RandomSampler(range(len(positions)), self.replacement, self.pass_length(positions), generator)
        return _repeat(order, positions)


class WeightedOrder:
    """Order of a `WeightedRandomSampler`: random, with the weights of the client's examples."""

    def __init__(self, sampler: WeightedRandomSampler) -> None:
        self.sampler = sampler

    def readable(self, positions: np.ndarray) -> np.ndarray:
        return positions[self.sampler.weights[positions].numpy() > 0]  # weight 0 is never drawn

    def pass_length(self, positions: np.ndarray) -> int:
        share = _share(self.sampler.num_samples, len(positions), len(self.sampler.weights))
        # Without replacement torch.multinomial cannot draw more examples than there are.
        return share if self.sampler.replacement else min(share, len(positions))

    def passes(self, positions: np.ndarray, round_idx: int, generator: torch.Generator) -> Passes:
        # Read in every visit: a project may give its sampler other weights in each epoch.
        weights, length = self.sampler.weights[positions], self.pass_length(positions)
        order = WeightedRandomSampler(weights, length, self.sampler.replacement, generator)  # type: ignore[arg-type]
        return _repeat(order, positions)


class SamplerOrder:
    """Order of a sampler of the user's own class: a client's examples as they come in passes over the whole data set.

    The sampler gets the round by ``set_epoch`` and draws from seeded global streams, or from its own ``generator``. All
    clients of a round take from the same passes.

    Raises:
        ValueError: the sampler has no length, or its order differs from one run to the next with the same seed.
    """

    def __init__(self, sampler: Any, seeds: tuple[int, ...]) -> None:
        self.sampler, self.seeds = sampler, seeds
        self._drawn: tuple[tuple[int, int], np.ndarray] | None = None
        name = type(sampler).__name__
        if not hasattr(sampler, "__len__"):
            raise ValueError(
                f"the training loader's sampler {name} has no length: add __len__, {OWN_BATCHES}"
            )
        first, self._drawn = self._draw(0, 0), None  # None: the next pass is drawn, not taken from here
        if not np.array_equal(first, self._draw(0, 0)):
            raise ValueError(
                f"the training loader's sampler {name} gives another order each time, also from the same seed, so a resumed "
                f"run would read other batches: have it draw from a global stream of torch, numpy or Python, {OWN_BATCHES}"
            )

    def readable(self, positions: np.ndarray) -> np.ndarray:
        # A random sampler may leave an example out of one pass and read it in the next.
        read = any(np.isin(positions, self._draw(0, number)).any() for number in range(PASSES))
        return positions if read else positions[:0]

    def pass_length(self, positions: np.ndarray) -> int:
        return int(np.isin(self._draw(0, 0), positions).sum())

    def passes(self, positions: np.ndarray, round_idx: int, generator: torch.Generator) -> Passes:
        number = 0
        while True:
            drawn = self._draw(round_idx, number)
            yield drawn[np.isin(drawn, positions)].tolist()
            number += 1

    def _draw(self, round_idx: int, number: int) -> np.ndarray:
        """Return a pass of the sampler over the whole data set; the last one is kept."""
        if self._drawn is None or self._drawn[0] != (round_idx, number):
            seed = derive_seed(*self.seeds, "sampler", round_idx, number)
            with use_seed(seed):
                announce_round(self.sampler, round_idx)
                # Such a sampler does not draw from the global streams that are seeded here.
                if isinstance(getattr(self.sampler, "generator", None), torch.Generator):
                    self.sampler.generator.manual_seed(seed)
                drawn = [int(index) for index in islice(self.sampler, len(self.sampler))]
            self._drawn = (round_idx, number), np.asarray(drawn, dtype=np.int64)
        return self._drawn[1]


def make_order(sampler: Any, num_examples: int, seeds: tuple[int, ...]) -> Order:
    """Return the order of a client's examples that follows from the user's sampler over a data set of ``num_examples``.

    Raises:
        ValueError: the sampler cannot be divided by client.
    """
    kind = type(sampler)
    if kind is SequentialSampler:
        return SequentialOrder(len(sampler.data_source))
    if kind is RandomSampler:
        return RandomOrder(np.arange(len(sampler.data_source)), sampler.num_samples, sampler.replacement)
    if kind is SubsetRandomSampler:
        return RandomOrder(np.asarray([int(index) for index in sampler.indices], np.int64), len(sampler))
    if kind is WeightedRandomSampler:
        if len(sampler.weights) != num_examples:
            raise ValueError(
                f"the training loader's WeightedRandomSampler has {len(sampler.weights)} weights for {num_examples} "
                "examples: give one for each"
            )
        return WeightedOrder(sampler)
    if kind is DistributedSampler:
        if sampler.num_replicas > 1:
            raise ValueError(
                f"the training loader's DistributedSampler has num_replicas={sampler.num_replicas} and leaves out the "
                "examples of other processes, but a federated run has one process: take it out, or set num_replicas=1"
            )
        if sampler.shuffle:
            return RandomOrder(np.arange(num_examples), num_examples)
        return SequentialOrder(num_examples)
    return SamplerOrder(sampler, seeds)


def announce_round(sampler: Any, round_idx: int) -> None:
    """Call ``set_epoch`` with the round where a sampler, or the sampler inside it, has that method."""
    for listener in (sampler, getattr(sampler, "sampler", None)):
        if callable(getattr(listener, "set_epoch", None)):
            listener.set_epoch(round_idx)  # type: ignore[union-attr]


@contextmanager
def use_seed(seed: int) -> Iterator[None]:
    """Seed all global random streams for a block and restore them afterwards."""
    with isolate_rng():
        seed_streams(seed)
        yield


def _repeat(sampler: Iterable[int], positions: np.ndarray) -> Passes:
    """Yield the positions in one pass of the sampler after another."""
    while True:
        yield (int(positions[index]) for index in sampler)


def _share(num_samples: int, num_own: int, source: int) -> int:
    """Return the share of a pass of ``num_samples`` for a client with ``num_own`` of ``source`` examples, at least 1."""
    return max(1, round(num_samples * num_own / source))  # else a small client would never train
