"""Batches of one round: lists of example indices for the groups of visits."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from fedlight.federation.client import Group, Visit
from fedlight.support.seeding import derive_seed

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

    A batch never holds an example twice: a pass gives ``floor(n / batch_size)`` full batches and leaves its remainder
    out, or gives it as a short last batch, and a client smaller than a batch gives all its examples. With ``lengths``, the
    examples of a pass are sorted by length before they are cut into batches, so that little is padded, and the batches are
    shuffled again.

    Args:
        indices: the client's example indices, ``(examples,)``.
        num_batches: number of batches, drawn in several passes where necessary.
        batch_size: most examples per batch.
        seed: seed of the order.
        lengths: tokens of every example of the pooled set; None: no bucketing.
        together: number of neighbours in ``indices`` that are drawn as one and share a batch.
        keeps_rest: whether a pass gives its remainder as a batch too.

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
    size = min(batch_size // together, len(groups))  # else a small client would give no batch
    per_pass = -(-len(groups) // size) if keeps_rest else len(groups) // size
    batches: list[np.ndarray] = []
    while len(batches) < num_batches:
        wanted = min(per_pass, num_batches - len(batches))
        drawn = generator.permutation(groups)[: wanted * size]
        if lengths is not None:
            drawn = drawn[np.argsort(lengths[drawn[:, 0]], kind="stable")]  # neighbours are equally long
        # Shuffled again, or a client would train on its short texts first.
        batches += [drawn[i * size : (i + 1) * size].reshape(-1) for i in generator.permutation(wanted)]
    return [batch.tolist() for batch in batches]


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

    Args:
        groups: groups of visits in training order.
        alone: function from a visit alone in its group to its batches.
        together: function from a visit beside others to its batches; None: ``alone``.
        join: function from the batches of the visits of a group to their common batch; by default one after the other.

    Attributes:
        counts: examples of each visit in the batches of several visits that have been drawn and not asked for yet.
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
    """Plan of a federated datamodule's rounds: its clients' examples, and the visits of the next round; see `draw_batches`.

    Attributes:
        groups: groups of visits of the next round, and its number; None before the first plan.
        counts: examples of each visit in the next batches of several visits, see `VisitSampler`.
        further: client id and split -> examples of a visit that trains on other data than the client's own.
    """

    client_indices: ClientIndices
    batch_size: int
    seed: int
    lengths: np.ndarray | None = None
    together: int = 1
    further: dict[tuple[str, str], np.ndarray] = field(default_factory=dict, init=False)
    groups: Sequence[Group] | None = field(default=None, init=False)
    round_idx: int = field(default=0, init=False)
    counts: deque[list[int]] = field(default_factory=deque, init=False)

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
