"""Batches of a round: the order of a client's examples, and the samplers of visits and of pooled data."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import (
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from fedlight.federation.client import Group, Visit
from fedlight.support.seeding import derive_seed, seed_streams

ClientIndices = Mapping[str, np.ndarray]
"""Client id -> indices of its examples in the pooled training set."""


def draw_batches(
    indices: np.ndarray,
    num_batches: int,
    batch_size: int,
    seed: int,
    lengths: np.ndarray | None = None,
    together: int = 1,
    keeps_rest: bool = False,
) -> list[list[int]]:
    """Return batches of a client's examples, drawn in passes that are each shuffled anew.

    A batch never holds an example twice: a pass gives ``floor(n / batch_size)`` full batches and leaves its remainder out,
    or, with ``keeps_rest``, gives it as a short last batch, and a client smaller than a batch gives all its examples. With
    ``lengths``, the tokens of every example of the pooled set, the examples of a pass are sorted by length before they are
    cut into batches, so that little is padded, and the batches are shuffled again. ``together`` neighbours in
    ``indices`` are drawn as one and share a batch.

    Examples:
        >>> draw_batches(np.array([7, 8, 9]), num_batches=2, batch_size=8, seed=0)
        [[9, 7, 8], [9, 8, 7]]
        >>> draw_batches(np.array([4, 5, 6, 7, 8, 9]), num_batches=1, batch_size=4, seed=0, together=2)
        [[8, 9, 4, 5]]
        >>> [len(batch) for batch in draw_batches(np.arange(20), 3, batch_size=8, seed=1, keeps_rest=True)]
        [4, 8, 8]
    """
    generator = np.random.default_rng(seed)
    groups = indices.reshape(-1, together)  # [groups, together]
    size, per_pass = _cut(len(groups), batch_size // together, keeps_rest)
    batches: list[np.ndarray] = []
    while len(batches) < num_batches:
        wanted = min(per_pass, num_batches - len(batches))
        drawn = generator.permutation(groups)[: wanted * size]
        if lengths is not None:
            drawn = drawn[np.argsort(lengths[drawn[:, 0]], kind="stable")]  # neighbours are equally long
        # Shuffled again, or a client would train on its short texts first.
        batches += [drawn[i * size : (i + 1) * size].reshape(-1) for i in generator.permutation(wanted)]
    return [batch.tolist() for batch in batches]


def _cut(examples: int, most: int, keeps_rest: bool) -> tuple[int, int]:
    """Return the examples of a batch, ``most`` where there are as many, and the batches of a pass."""
    size = min(most, examples)  # else a small client would give no batch
    return size, -(-examples // size) if keeps_rest else examples // size


def batches_in_pass(examples: int, batch_size: int, together: int = 1) -> int:
    """Return the number of batches in one pass over all of so many examples, at least 1.

    Examples:
        >>> batches_in_pass(20, 8), batches_in_pass(3, 8), batches_in_pass(12, 5, together=2)
        (3, 1, 3)
    """
    return max(1, -(-examples // (batch_size // together * together)))


def concatenate(batches: Sequence[list[int]]) -> list[int]:
    """Return the positions of several batches as one batch."""
    return [position for batch in batches for position in batch]


class VisitSampler(Sampler[list[int]]):
    """Sampler of the batches of groups of visits; a group's batches are drawn when its first one is requested.

    ``alone`` draws the batches of a visit alone in its group, ``together`` those of a visit beside others, by default alike;
    ``join`` makes their common batch, by default one after the other.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        alone: Callable[[Visit], Iterable[Any]],
        together: Callable[[Visit], Iterable[Any]] | None = None,
        join: Callable[[Sequence[Any]], Any] = concatenate,
    ) -> None:
        self.groups, self.join = groups, join
        self.alone, self.together = alone, together or alone
        # Examples of each visit in the batches of several visits that have been drawn and not asked for yet.
        self.counts: deque[list[int]] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        self.counts.clear()  # of an interrupted pass
        # Drawn late: the examples of a visit may be chosen by the model that the visit before has trained.
        for group in self.groups:
            if len(group) == 1:
                yield from self.alone(group[0])
                continue
            for batches in zip(*map(self.together, group), strict=True):
                self.counts.append([*map(len, batches)])
                yield self.join(batches)

    def __len__(self) -> int:  # with a known length, Lightning does not prefetch
        return sum(group[0].num_batches for group in self.groups)


@dataclass(eq=False)
class RoundPlan:
    """Plan of a federated datamodule's rounds: its clients' examples, and visits of the next round; see `draw_batches`."""

    client_indices: ClientIndices
    batch_size: int
    seed: int
    lengths: np.ndarray | None = None
    together: int = 1
    # client id and split -> examples of a visit that trains on other data than the client's own
    further: dict[tuple[str, str], np.ndarray] = field(default_factory=dict, init=False)
    # groups of visits of the next round; None before the first plan
    groups: Sequence[Group] | None = field(default=None, init=False)
    round_idx: int = field(default=0, init=False)
    counts: deque[list[int]] = field(default_factory=deque, init=False)  # see `VisitSampler`

    def set_visits(self, visits: Sequence[Visit], round_idx: int) -> None:
        """Set the visits of the next round, one after the other."""
        self.set_groups([(visit,) for visit in visits], round_idx)

    def set_groups(self, groups: Sequence[Group], round_idx: int) -> None:
        """Set the groups of visits of the next round."""
        self.groups, self.round_idx = groups, round_idx

    def num_batches(self, client_id: str) -> int:
        """Return the number of batches in one pass over all examples of a client; the last may be short."""
        return batches_in_pass(len(self.client_indices[client_id]), self.batch_size, self.together)

    def indices(self, client_id: str, split: str = "train") -> np.ndarray:
        """Return the examples of a visit; ValueError where the client has none in this split."""
        if split == "train":
            return self.client_indices[client_id]
        if (client_id, split) not in self.further:
            raise ValueError(
                f"a visit to client {client_id} trains on {split!r} data, but there are none: use a datamodule that makes "
                "them, such as SyntheticInstructionDataModule, and have them chosen before the visit"
            )
        return self.further[client_id, split]

    def sampler(self) -> VisitSampler:
        """Return a sampler of the round's batches, group after group, which fills ``counts``."""
        sampler = VisitSampler(self.groups or (), partial(self.batches, round_idx=self.round_idx))
        self.counts = sampler.counts
        return sampler

    def batches(self, visit: Visit, round_idx: int) -> list[list[int]]:
        """Return the example indices of each batch of a visit, drawn by the round that asked its client."""
        seed = derive_seed(self.seed, "order", visit.asked_in(round_idx), visit.client_id, visit.split)
        return draw_batches(
            self.indices(visit.client_id, visit.split),
            visit.num_batches,
            self.batch_size,
            seed,
            self.lengths,
            self.together,
            keeps_rest=visit.whole_passes,
        )

    def passes(self, visit: Visit) -> int:
        """Return the passes over its client's examples that a visit begins; an example is in one batch of a pass at most."""
        examples = len(self.indices(visit.client_id, visit.split)) // self.together
        _, per_pass = _cut(examples, self.batch_size // self.together, visit.whole_passes)
        return -(-visit.num_batches // per_pass)


class PooledSampler(Sampler[list[int]]):
    """Sampler of the full batches of all clients' examples, shuffled anew for each epoch; arguments as `draw_batches`.

    Less than a batch is left out of an epoch, another part each time.
    """

    def __init__(
        self,
        num_examples: int,
        batch_size: int,
        seed: int,
        lengths: np.ndarray | None = None,
        together: int = 1,
    ) -> None:
        self.indices = np.arange(num_examples)
        self.batch_size, self.seed, self.lengths, self.together = batch_size, seed, lengths, together
        self.epoch = 0
        self.sampler = self  # Lightning looks here for set_epoch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        seed = derive_seed(self.seed, "pooled", self.epoch)
        return iter(draw_batches(self.indices, len(self), self.batch_size, seed, self.lengths, self.together))

    def __len__(self) -> int:
        """Number of full batches in a pass, at least 1."""
        return max(1, len(self.indices) // self.batch_size)


Passes = Iterator[Iterable[int]]


PASSES = 100
"""A sampler that leaves out all of a client's examples in this many passes never reads them."""


OWN_BATCHES = (
    "set how one client's examples are read, ByClient(clients, batch_sampler=lambda own_set: BatchSampler(...)), or give "
    "the loader shuffle=True"
)


class Order(Protocol):
    """Order of the examples in a client's passes; ``is_by_lot``: whether it is known to depend on none of them."""

    is_by_lot: bool = False

    def readable(self, positions: np.ndarray) -> np.ndarray:
        """Return the client's positions that the sampler can read."""

    def pass_length(self, positions: np.ndarray) -> int:
        """Return the number of examples in one pass over readable positions."""

    def passes(self, positions: np.ndarray, round_idx: int, generator: torch.Generator) -> Passes:
        """Yield the positions of one pass after another, without end; random ones from the generator or by the round."""


class SequentialOrder(Order):
    """Order of a `SequentialSampler` over the first ``num_examples`` of the data set: by position."""

    is_by_lot = True

    def __init__(self, num_examples: int) -> None:
        self.num_examples = num_examples

    def readable(self, positions: np.ndarray) -> np.ndarray:
        return np.sort(positions[positions < self.num_examples])  # its source may be shorter

    def pass_length(self, positions: np.ndarray) -> int:
        return len(positions)

    def passes(self, positions: np.ndarray, round_idx: int, generator: torch.Generator) -> Passes:
        while True:
            yield positions.tolist()


class RandomOrder(Order):
    """Order of a `RandomSampler` or `SubsetRandomSampler` over the positions in ``source``, with or without replacement.

    A client gets its share of the ``num_samples`` examples in a pass of the sampler.
    """

    def __init__(self, source: np.ndarray, num_samples: int, replacement: bool = False) -> None:
        self.source, self.num_samples, self.replacement = source, num_samples, replacement
        self.is_by_lot = not replacement

    def readable(self, positions: np.ndarray) -> np.ndarray:
        return positions[np.isin(positions, self.source)]

    def pass_length(self, positions: np.ndarray) -> int:
        return _share(self.num_samples, len(positions), len(self.source))

    def passes(self, positions: np.ndarray, round_idx: int, generator: torch.Generator) -> Passes:
        order = RandomSampler(range(len(positions)), self.replacement, self.pass_length(positions), generator)
        return _repeat(order, positions)


class WeightedOrder(Order):
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


class SamplerOrder(Order):
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
