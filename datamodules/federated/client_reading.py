"""Batches of a client's examples, equal to those of a loader over them alone with the user's settings."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Subset

from fedlight.datamodules.clients.partition import Clients
from fedlight.datamodules.federated.client_orders import PASSES, announce_round, make_order, use_seed
from fedlight.support.seeding import derive_seed

MakeBatches = Callable[[Subset], Iterable[list[int]]]
"""Function from a client's own data set to its batch sampler: lists of positions in it, one pass per iteration."""


class ClientReading:
    """Batches of clients' visits, by the sampler, batch size and ``drop_last`` of the user's loader.

    Args:
        loader: the user's training loader.
        make_batches: function that makes each client's batch sampler instead; None: use those of the loader.
        seed: seed of the order; where the loader has a generator, its initial seed counts as well.

    Attributes:
        batched: whether the loader makes batches of examples; otherwise every example of the data set is a batch.

    Raises:
        ValueError: the loader's sampler or batch sampler cannot be divided by client.
    """

    def __init__(self, loader: DataLoader, make_batches: MakeBatches | None, seed: int) -> None:
        self.make_batches, self._dataset = make_batches, loader.dataset
        given: Any = loader.batch_sampler
        if given is not None and type(given) is not BatchSampler and make_batches is None:
            kind = type(given).__name__
            raise ValueError(
                f"the training loader has batch_sampler={kind}, which batches the examples of all clients together: set "
                f"how one client's are batched, ByClient(clients, batch_sampler=lambda own_set: {kind}(...)), or give the "
                "loader a batch_size"
            )
        sampler = loader.sampler if given is None or make_batches else given.sampler
        generator = loader.generator or getattr(sampler, "generator", None)
        # Who seeds the loader's generator wants that order; its state is not read, which a resumed run would not have.
        self.seeds = (seed,) if generator is None else (seed, generator.initial_seed())
        self.batched = given is not None or make_batches is not None
        if make_batches is None:
            self._order = make_order(sampler, len(loader.dataset), self.seeds)  # type: ignore[arg-type]
            self._kind = type(sampler).__name__
            self._batch_size: int = 1 if given is None else given.batch_size
            self._drop_last: bool = False if given is None else given.drop_last

    def readable(self, clients: Clients) -> Clients:
        """Return the positions of each client that the sampler can read.

        Raises:
            ValueError: the sampler reads none of a client's examples, or not enough for one batch.
        """
        if self.make_batches is not None:
            self._check_repeatable(clients)
            return clients
        readable = {client: self._order.readable(positions) for client, positions in clients.items()}
        for client, positions in readable.items():
            if len(clients[client]) and not len(positions):
                raise ValueError(
                    f"client {client!r}: the training loader's {self._kind} reads none of its {len(clients[client])} "
                    "examples: leave the client out, or change the sampler"
                )
            # Passes may differ in length: one without a batch is no reason to refuse the client.
            if len(positions) and not self._count(positions) and not self._draw(client, positions, 0, 1):
                raise ValueError(
                    f"client {client!r} has {len(positions)} examples, fewer than batch_size={self._batch_size}, and the "
                    "training loader has drop_last=True: leave the client out, lower batch_size or set drop_last=False"
                )
        return readable

    def num_batches(self, positions: np.ndarray) -> int:
        """Return the number of batches in one pass over a client's examples, at least 1."""
        return max(1, self._count(positions))

    def batches(self, client_id: str, positions: np.ndarray, round_idx: int, wanted: int) -> list[Any]:
        """Return ``wanted`` batches of positions, drawn in several passes where needed; single positions if not ``batched``.

        Raises:
            ValueError: the client's batch sampler gives no batch.
        """
        batches = self._draw(client_id, positions, round_idx, wanted)
        if len(batches) < wanted:
            raise ValueError(f"client {client_id!r}: its batch sampler gives no batch: leave the client out")
        return batches

    def _count(self, positions: np.ndarray) -> int:
        """Return the number of batches in one pass, possibly 0."""
        if self.make_batches is not None:
            with use_seed(derive_seed(*self.seeds, "count")):  # the function may draw from them
                made: Any = self.make_batches(Subset(self._dataset, positions.tolist()))
                return len(made) if hasattr(made, "__len__") else sum(1 for _ in made)
        examples = self._order.pass_length(positions)
        return examples // self._batch_size if self._drop_last else -(-examples // self._batch_size)

    def _draw(self, client_id: str, positions: np.ndarray, round_idx: int, wanted: int) -> list[Any]:
        """Return the wanted batches, fewer where the passes are empty."""
        seed = derive_seed(*self.seeds, "order", round_idx, client_id)
        # The user's function may draw from any global stream.
        with nullcontext() if self.make_batches is None else use_seed(seed):
            generator = torch.Generator().manual_seed(seed)
            return list(islice(_flatten(self._passes(positions, round_idx, generator)), wanted))

    def _check_repeatable(self, clients: Clients) -> None:
        """Check that ``make_batches`` gives the same batches from the same seed, at the first client with examples."""
        client = next((name for name, positions in clients.items() if len(positions)), None)
        if client is None:
            return
        first, again = (self.batches(client, clients[client], 0, 2) for _ in range(2))
        if first != again:
            raise ValueError(
                f"ByClient(batch_sampler=...) gives client {client!r} other batches each time, also from the same seed, so "
                "a resumed run would read other ones: have it draw from a global stream of torch, numpy or Python"
            )

    def _passes(
        self, positions: np.ndarray, round_idx: int, generator: torch.Generator
    ) -> Iterator[Iterable[Any]]:
        if self.make_batches is not None:
            made = self.make_batches(Subset(self._dataset, positions.tolist()))
            announce_round(made, round_idx)
            while True:  # one pass per iteration
                yield (positions[batch].tolist() for batch in map(_check_batch, made))
        for order in self._order.passes(positions, round_idx, generator):
            yield BatchSampler(order, self._batch_size, self._drop_last) if self.batched else order


def _check_batch(batch: Any) -> list[int]:
    if isinstance(batch, Iterable):
        return list(batch)
    raise ValueError(
        f"ByClient(batch_sampler=...) gives {batch!r} as a batch: give lists of positions in the client's own data set"
    )


def _flatten(passes: Iterator[Iterable[Any]]) -> Iterator[Any]:
    """Yield the batches of the passes; stop after `PASSES` empty ones in a row."""
    empty = 0
    while empty < PASSES:
        empty += 1
        for batch in next(passes):
            empty = 0
            yield batch
