"""In which batches a client reads its examples: as a loader over them alone would, with the user's own settings."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Subset

from fedlight.datamodules.clients.partition import Clients
from fedlight.datamodules.federated.client_orders import PASSES, announce, order_of, seeded
from fedlight.support.seeding import derive_seed

MakeBatches = Callable[[Subset], Iterable[list[int]]]
"""A client's own data set -> its batch sampler: batches of positions in it, of one pass, each time it is iterated."""


class ClientReading:
    """The batches of clients' visits, by the sampler, batch size and ``drop_last`` of the user's loader.

    Args:
        loader: the user's.
        make_batches: makes each client's batch sampler instead.
        seed: of the order; of a generator in the loader, the seed that it started from counts as well.

    Attributes:
        batched: whether the loader makes batches of examples; else every example of the data set is a batch.
        seeds: of all that is drawn.

    Raises:
        ValueError: the loader's sampler or batch sampler cannot be taken apart by client.
    """

    def __init__(self, loader: DataLoader, make_batches: MakeBatches | None, seed: int) -> None:
        self.make_batches, self._dataset = make_batches, loader.dataset
        given: Any = loader.batch_sampler
        if given is not None and type(given) is not BatchSampler and make_batches is None:
            kind = type(given).__name__
            raise ValueError(
                f"the training loader has batch_sampler={kind}, which batches the examples of all clients together: say how "
                f"one client's are batched, ByClient(clients, batch_sampler=lambda own_set: {kind}(...)), or give the "
                "loader a batch_size"
            )
        sampler = loader.sampler if given is None or make_batches else given.sampler
        generator = loader.generator or getattr(sampler, "generator", None)
        self.seeds = (seed,) if generator is None else (seed, generator.initial_seed())
        self.batched = given is not None or make_batches is not None
        if make_batches is None:
            self._order = order_of(sampler, len(loader.dataset), self.seeds)  # type: ignore[arg-type]
            self._kind = type(sampler).__name__
            self._batch_size: int = 1 if given is None else given.batch_size
            self._drop_last: bool = False if given is None else given.drop_last

    def readable(self, clients: Clients) -> Clients:
        """The positions of each client that the sampler reads at all.

        Raises:
            ValueError: it reads none of a client's, or not one batch.
        """
        if self.make_batches is not None:
            self._check_made(clients)
            return clients
        found = {client: self._order.readable(own) for client, own in clients.items()}
        for client, own in found.items():
            if len(clients[client]) and not len(own):
                raise ValueError(
                    f"client {client!r}: the training loader's {self._kind} reads none of its {len(clients[client])} "
                    "examples: leave the client out, or change the sampler"
                )
            if len(own) and not self._in_pass(own) and not self._found(client, own, 0, 1):
                raise ValueError(
                    f"client {client!r} has {len(own)} examples, fewer than batch_size={self._batch_size}, and the training "
                    "loader has drop_last=True: leave the client out, lower batch_size or set drop_last=False"
                )
        return found

    def batches_of_pass(self, positions: np.ndarray) -> int:
        """Batches in one pass over a client's examples, at least 1."""
        return max(1, self._in_pass(positions))

    def _in_pass(self, positions: np.ndarray) -> int:
        if self.make_batches is not None:
            with seeded(derive_seed(*self.seeds, "count")):
                made: Any = self.make_batches(Subset(self._dataset, positions.tolist()))
                return len(made) if hasattr(made, "__len__") else sum(1 for _ in made)
        number = self._order.of_pass(positions)
        return number // self._batch_size if self._drop_last else -(-number // self._batch_size)

    def batches(self, client_id: str, positions: np.ndarray, round_idx: int, wanted: int) -> list[Any]:
        """The batches of a visit, over as many passes as that takes.

        Args:
            client_id: whose.
            positions: the client's.
            round_idx: of the visit.
            wanted: number of batches.

        Returns:
            Lists of positions, or single positions where the loader makes no batches.
        """
        found = self._found(client_id, positions, round_idx, wanted)
        if len(found) < wanted:
            raise ValueError(f"client {client_id!r}: its batch sampler gives no batch: leave the client out")
        return found

    def _found(self, client_id: str, positions: np.ndarray, round_idx: int, wanted: int) -> list[Any]:
        """As many of these batches as there are."""
        seed = derive_seed(*self.seeds, "order", round_idx, client_id)
        # What the user's function makes may draw from any stream.
        with nullcontext() if self.make_batches is None else seeded(seed):
            generator = torch.Generator().manual_seed(seed)
            return list(islice(_flat(self._passes(positions, round_idx, generator)), wanted))

    def _check_made(self, clients: Clients) -> None:
        """Refuses a function of the user's whose batches cannot be had twice."""
        client, own = next(((name, own) for name, own in clients.items() if len(own)), ("", None))
        if own is not None and self.batches(client, own, 0, 2) != self.batches(client, own, 0, 2):
            raise ValueError(
                f"ByClient(batch_sampler=...) gives client {client!r} other batches each time, also from the same seed, so "
                "a resumed run would read other ones: have it draw from a global stream of torch, numpy or Python"
            )

    def _passes(
        self, positions: np.ndarray, round_idx: int, generator: torch.Generator
    ) -> Iterator[Iterable[Any]]:
        if self.make_batches is not None:
            made = self.make_batches(Subset(self._dataset, positions.tolist()))
            announce(made, round_idx)
            while True:
                yield (positions[batch].tolist() for batch in map(_as_batch, made))
        for order in self._order.passes(positions, round_idx, generator):
            yield BatchSampler(order, self._batch_size, self._drop_last) if self.batched else order


def _as_batch(batch: Any) -> list[int]:
    if isinstance(batch, Iterable):
        return list(batch)
    raise ValueError(
        f"ByClient(batch_sampler=...) gives {batch!r} as a batch: give lists of positions in the client's own data set"
    )


def _flat(passes: Iterator[Iterable[Any]]) -> Iterator[Any]:
    empty = 0
    while empty < PASSES:
        empty += 1
        for batch in next(passes):
            empty = 0
            yield batch
