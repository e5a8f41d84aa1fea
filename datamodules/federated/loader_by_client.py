"""Data of a project read by client: its own loader, and batches equal to those of a loader over one client alone."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Subset, get_worker_info

from fedlight.datamodules.clients.partition import Clients
from fedlight.datamodules.clients.splits import ClientCount, count_labels
from fedlight.datamodules.federated.client_positions import read_positions
from fedlight.datamodules.federated.rounds import PASSES, VisitSampler, announce_round, make_order, use_seed
from fedlight.devices.shape import BatchShape
from fedlight.federation.client import Group, Visit
from fedlight.support.pokes import set_training_source, training_source
from fedlight.support.seeding import derive_seed, seed_streams
from fedlight.support.settings_record import digest

MakeBatches = Callable[[Subset], Iterable[list[int]]]
"""Function from a client's own data set to its batch sampler: lists of positions in it, one pass per iteration."""


class ClientReading:
    """Batches of clients' visits, by the sampler, batch size and ``drop_last`` of the user's loader, or ``make_batches``.

    The order has a seed; where the loader has a generator, its initial seed counts as well.

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
        # Otherwise every example of the data set is a batch.
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

    def is_by_lot(self, clients: Clients) -> bool:
        """Return whether batches are known to depend on no example, with each example once in a pass at most."""
        if self.make_batches is not None or not self.batched or not self._order.is_by_lot:
            return False
        return all(self._order.pass_length(each) <= len(each) for each in clients.values())

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


ClientsOfData = Callable[[Any], Mapping[Any, Any]] | Mapping[Any, Any]
"""Client id -> positions in the training set, or a function from the set to them."""


class LoaderByClient:
    """Source of a trainer's training batches that replaces the one in its fit loop: a datamodule, a module, or loaders.

    The user's loader is requested when Lightning first requests it, after ``setup`` of datamodule and module, or by
    ``open``. The loader of the rounds is a copy of it with another order: its class, data set, collation, workers and memory
    settings are kept. When Lightning attaches the data of another ``fit``, the previous source is restored. Arguments as
    `ByClient`, whose ``batch_sampler`` is ``make_batches``.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        clients: ClientsOfData,
        seed: int = 0,
        make_batches: MakeBatches | None = None,
    ) -> None:
        self.given = training_source(trainer)
        self.name = self.given.name
        self._trainer = trainer
        self._clients, self._seed, self._make_batches = clients, seed, make_batches
        self._when_open: list[Callable[[], None]] = []
        self._loader: Any = None
        self._visits = VisitSampler([], self._read, self._read_together, JoinedBatch)
        self._round_idx = 0
        set_training_source(trainer, self)

    @property
    def instance(self) -> Any:
        """Source that the user gave to ``fit``: a datamodule, a module, or loaders."""
        return self.given.instance

    @instance.setter
    def instance(self, value: Any) -> None:
        self.given.instance = value
        set_training_source(self._trainer, self.given)

    def is_defined(self) -> bool:
        """Return whether there is a training loader."""
        return bool(self.given.is_defined())

    def is_module(self) -> bool:
        """Return whether a module or datamodule makes the training loader."""
        return bool(self.given.is_module())

    def when_open(self, then: Callable[[], None]) -> None:
        """Call a function once clients and sizes are known."""
        self._when_open.append(then)

    def open(self) -> None:
        """Request the user's loader and the clients of its examples, once.

        Raises:
            ValueError: the data are not one loader over a data set with positions, or cannot be divided by client.
        """
        if self._loader is not None:
            return
        loader = _check_loader(self.given.dataloader())
        self._reading = ClientReading(loader, self._make_batches, self._seed)
        assigned = self._clients(loader.dataset) if callable(self._clients) else self._clients
        clients = read_positions(assigned, len(loader.dataset))  # type: ignore[arg-type]
        self._indices: Clients = self._reading.readable(clients)
        self._loader = copy.copy(loader)  # one for all rounds, so that persistent workers persist
        part = "batch_sampler" if self._reading.batched else "sampler"
        # Set past DataLoader.__setattr__, which refuses another order for an existing loader.
        vars(self._loader).update({part: self._visits, "_iterator": None, "generator": torch.Generator()})
        for then in self._when_open:
            then()

    def dataloader(self) -> Any:
        """Return the loader of the round's visits, or the user's own where no federated loop waits for one."""
        if not self._when_open and self._loader is None:
            return self.given.dataloader()
        self.open()
        # torch draws the seeds of the workers from it; a resumed run has to draw the same.
        self._loader.generator.manual_seed(derive_seed(*self._reading.seeds, "workers", self._round_idx))
        return self._loader

    def client_sizes(self) -> dict[str, int]:
        """Return the number of training examples of each client that the sampler reads."""
        self.open()
        return {client: len(positions) for client, positions in self._indices.items()}

    def examples_digest(self) -> str:
        """Return a digest of the examples of each client and of the seeds of their order."""
        self.open()
        return digest(
            *self._reading.seeds, *(part for pair in sorted(self._indices.items()) for part in pair)
        )

    def client_counts(self) -> list[ClientCount]:
        self.open()
        return count_labels("train", self._indices, None)

    def num_batches(self, client_id: str, split: str = "train") -> int:
        self.open()
        return self._reading.num_batches(self._indices[client_id])

    def set_visits(self, visits: Sequence[Visit], round_idx: int) -> None:
        self.set_groups([(visit,) for visit in visits], round_idx)

    def set_groups(self, groups: Sequence[Group], round_idx: int) -> None:
        """Set the groups of visits of the next round; ValueError for several visits at once of a loader without batches."""
        if not self._reading.batched and any(len(group) > 1 for group in groups):
            raise ValueError(
                "clients_at_once above 1 collates examples of several clients into one batch, and the training "
                "loader has batch_size=None: have the loader make the batches, or set clients_at_once=1"
            )
        self._visits.groups, self._round_idx = groups, round_idx

    def next_counts(self) -> list[int]:
        return self._visits.counts.popleft()

    def draw_by_lot(self) -> None:
        """Raise ValueError for a loader whose batches may depend on the examples, or repeat one in a pass."""
        if not self._reading.is_by_lot(self._indices):
            raise ValueError(
                "DPSGD counts on batches that no example decides, each example once in a pass: give the training loader a "
                "batch_size and shuffle=True, and no sampler of another kind"
            )

    def passes(self, visit: Visit) -> int:
        return -(-visit.num_batches // self.num_batches(visit.client_id))

    def batch_shapes(self, visit: Visit, round_idx: int) -> list[BatchShape]:
        """Return the number of examples in each batch of a visit; ValueError where the loader makes no batches."""
        if not self._reading.batched:
            raise ValueError(
                "fleet needs to know how many examples a batch has, and the training loader has batch_size=None: "
                "have the loader make the batches"
            )
        return [BatchShape(len(batch)) for batch in self._batches(visit, round_idx)]

    def example_batch(self, examples: int) -> Any:
        return self._loader.collate_fn([self._loader.dataset[i] for i in range(examples)])

    def first_examples(self) -> Any:
        """Return the first examples of the first client as a batch, which processes compare; None with workers."""
        positions = next(iter(self._indices.values()))[:2].tolist()
        if self._loader.num_workers:  # some data sets must not be opened before the workers fork
            return None
        return self._loader.collate_fn([self._loader.dataset[i] for i in positions])

    def _read(self, visit: Visit) -> Iterator[Any]:
        """Yield the batches of a visit; random transforms of the data set draw from seeds of this visit alone."""
        # Without workers the training process reads; the loop seeds its streams again for the visit itself.
        if self._loader.num_workers == 0:
            # A random crop, mask or noise draws from the global streams. Unseeded, it would depend on what this process
            # has read before: other clients' examples, or examples of the run before it was resumed.
            seed_streams(derive_seed(*self._purpose(visit)))
            yield from self._batches(visit, self._round_idx)
        else:
            yield from self._read_together(visit)

    def _read_together(self, visit: Visit) -> Iterator[Any]:
        """Yield the batches of a visit; each seeds the streams when it is read."""
        is_read_here = self._loader.num_workers == 0
        for number, batch in enumerate(self._batches(visit, self._round_idx)):
            seed = derive_seed(*self._purpose(visit), number)
            yield (
                SeededBatch(batch, seed, is_read_here) if isinstance(batch, list) else ForWorker(batch, seed)
            )

    def _purpose(self, visit: Visit) -> tuple[int | str, ...]:
        return *self._reading.seeds, visit.asked_in(self._round_idx), visit.client_id, "read"

    def _batches(self, visit: Visit, round_idx: int) -> list[Any]:
        if visit.split != "train":
            raise ValueError(
                f"a visit to client {visit.client_id} trains on {visit.split!r} data, which a project's own loader does not "
                "have: use a datamodule that makes them, such as SyntheticInstructionDataModule"
            )
        positions = self._indices[visit.client_id]
        return self._reading.batches(visit.client_id, positions, visit.asked_in(round_idx), visit.num_batches)


class SeededBatch(list[int]):
    """Positions of a batch that seed the streams of the process that reads them: of the training one if ``is_read_here``."""

    def __init__(self, positions: Sequence[int] = (), seed: int = 0, is_read_here: bool = False) -> None:
        super().__init__(positions)
        self.seed = seed
        self.is_read_here = is_read_here

    def __iter__(self) -> Iterator[int]:
        # A worker iterates over the positions just before it reads; the training process does so to send them to a worker.
        if self.is_read_here or get_worker_info() is not None:
            seed_streams(self.seed)
        return super().__iter__()


class ForWorker(int):
    """Position that is a batch of its own, for a worker: where it arrives, just before it is read, it seeds the streams."""

    seed: int

    def __new__(cls, position: int, seed: int) -> "ForWorker":
        self = super().__new__(cls, position)
        self.seed = seed
        return self

    def __reduce__(self) -> Any:
        return _seeded, (int(self), self.seed)


def _seeded(position: int, seed: int) -> int:
    seed_streams(seed)
    return position


class JoinedBatch(list[int]):
    """Positions of the batches of several clients; each batch is read on its own seed."""

    def __init__(self, batches: Sequence[list[int]] = ()) -> None:
        # SeededBatch's own __iter__ would seed the streams here already.
        super().__init__(position for batch in batches for position in list.__iter__(batch))
        self.batches = batches

    def __iter__(self) -> Iterator[int]:
        for batch in self.batches:
            yield from batch

    def __reduce__(self) -> Any:  # or the positions would be sent to a worker twice
        return JoinedBatch, (self.batches,)


def _check_loader(given: Any) -> DataLoader:
    """Return the training loader; raise ValueError for data that are not one loader over a map-style data set."""
    if isinstance(given, CombinedLoader):
        given = given.iterables
    parts = [*given.values()] if isinstance(given, Mapping) else given
    if isinstance(parts, (list, tuple)) and any(isinstance(part, DataLoader) for part in parts):
        raise ValueError(
            f"the training data are a {type(given).__name__} of {len(given)} loaders, and a client's visit reads one: give "
            "one DataLoader over one data set, such as a torch StackDataset of theirs"
        )
    if not isinstance(given, DataLoader):
        raise ValueError(
            f"the training data are a {type(given).__name__}, whose examples cannot be assigned to clients: give a "
            "torch DataLoader over a map-style data set"
        )
    name = type(given.dataset).__name__
    if isinstance(given.dataset, IterableDataset):
        raise ValueError(
            f"the training data are of the iterable data set {name}, whose examples have no positions that could be a "
            "client's: give the trainer a DataLoader over a map-style data set (__len__ and __getitem__)"
        )
    if not hasattr(given.dataset, "__len__"):
        raise ValueError(
            f"the training set {name} has no length, so its examples cannot be assigned to clients: add __len__"
        )
    return given
