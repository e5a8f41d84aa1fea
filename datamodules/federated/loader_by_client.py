"""A project's own training loader, read client after client; all else of the project stays as it was given.

What a Lightning trainer trains on comes from the data source of its fit loop: the datamodule, the module, or loaders given
to ``fit``. :class:`LoaderByClient` takes the place of that source and of nothing else, so the trainer's datamodule, its
hooks, its state, its hyperparameters and its other loaders are the user's own.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from fedlight.datamodules.clients.counts import ClientCount, count_labels
from fedlight.datamodules.clients.partition import Clients
from fedlight.datamodules.federated.client_positions import client_positions
from fedlight.datamodules.federated.client_reading import ClientReading, MakeBatches
from fedlight.datamodules.federated.rounds import VisitSampler
from fedlight.datamodules.federated.seeded_reading import seeded_reading
from fedlight.devices.shape import BatchShape
from fedlight.federation.client import Visit
from fedlight.support.seeding import derive_seed
from fedlight.support.settings_record import digest


class LoaderByClient(_DataLoaderSource):
    """The source of the training batches of a trainer, in the place of the one that it has.

    The user's loader is asked for when Lightning first asks for it, behind the ``setup`` of datamodule and module, or when
    ``open`` is called. The loader that reads the rounds is a copy of it with another order: its class, data set, collation,
    workers and memory settings are kept, and one copy serves all rounds, so persistent workers persist. When Lightning
    attaches the data of another ``fit``, the source that was there before is back.

    Args:
        trainer: whose source it is from now on.
        clients: training set -> client id -> positions in it; see `fedlight.datamodules.federated.client_positions`.
        seed: of the order of the examples.
        make_batches: a client's own data set -> its batch sampler, in the place of the loader's own batches.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        clients: Callable[[Any], Mapping[Any, Any]],
        seed: int = 0,
        make_batches: MakeBatches | None = None,
    ) -> None:
        self.given: _DataLoaderSource = trainer.fit_loop._data_source
        self.name = self.given.name
        self._trainer = trainer
        self._clients, self._seed, self._make_batches = clients, seed, make_batches
        self._when_open: list[Callable[[], None]] = []
        self._loader: Any = None
        self._visits = VisitSampler([], self._read)
        self._round_idx = 0
        trainer.fit_loop._data_source = self

    @property
    def instance(self) -> Any:
        """What the user gave: a datamodule, a module, or loaders."""
        return self.given.instance

    @instance.setter
    def instance(self, value: Any) -> None:
        self.given.instance = value
        self._trainer.fit_loop._data_source = self.given

    def when_open(self, then: Callable[[], None]) -> None:
        """Has this done once clients and sizes are known."""
        self._when_open.append(then)

    def open(self) -> None:
        """Asks for the user's loader and whose example is whose, once.

        Raises:
            ValueError: for training data that are no single loader over a data set with positions, a sampler that cannot be
                taken apart by client, or positions that are none.
        """
        if self._loader is not None:
            return
        loader = _single_loader(self.given.dataloader())
        self._reading = ClientReading(loader, self._make_batches, self._seed)
        clients = client_positions(self._clients(loader.dataset), len(loader.dataset))  # type: ignore[arg-type]
        self._indices: Clients = self._reading.readable(clients)
        self._loader = copy.copy(loader)
        part = "batch_sampler" if self._reading.batched else "sampler"
        # Set past DataLoader.__setattr__, which lets no loader be given another order.
        vars(self._loader).update({part: self._visits, "_iterator": None, "generator": torch.Generator()})
        for then in self._when_open:
            then()

    def dataloader(self) -> Any:
        """The batches of the round's visits; where no federated loop asked for any, what the user gave."""
        if not self._when_open and self._loader is None:
            return self.given.dataloader()
        self.open()
        self._loader.generator.manual_seed(derive_seed(*self._reading.seeds, "workers", self._round_idx))
        return self._loader

    def client_sizes(self) -> dict[str, int]:
        """Training examples of each client that its sampler reads."""
        self.open()
        return {client: len(own) for client, own in self._indices.items()}

    def examples_digest(self) -> str:
        """Of which examples each client has, and of the seeds by which they are read."""
        self.open()
        return digest(
            *self._reading.seeds, *(part for pair in sorted(self._indices.items()) for part in pair)
        )

    def client_counts(self) -> list[ClientCount]:
        """How many training examples every client has."""
        self.open()
        return count_labels("train", self._indices, None)

    def num_batches(self, client_id: str, split: str = "train") -> int:
        """Batches in one pass over the client's data, as its own loader would have."""
        self.open()
        return self._reading.batches_of_pass(self._indices[client_id])

    def set_visits(self, visits: Sequence[Visit], round_idx: int) -> None:
        """Makes the training loader stream these visits."""
        self._visits.visits, self._round_idx = visits, round_idx

    def batch_shapes(self, visit: Visit, round_idx: int) -> list[BatchShape]:
        """How many examples each batch of a visit has.

        Raises:
            ValueError: the loader makes no batches, so that is not known.
        """
        if not self._reading.batched:
            raise ValueError(
                "federated.fleet needs to know how many examples a batch has, and the training loader has batch_size=None: "
                "have the loader make the batches"
            )
        return [BatchShape(len(batch)) for batch in self._batches(visit, round_idx)]

    def example_batch(self, examples: int) -> Any:
        """The first so many training examples as a batch."""
        return self._loader.collate_fn([self._loader.dataset[i] for i in range(examples)])

    def _read(self, visit: Visit) -> Iterator[Any]:
        purpose = *self._reading.seeds, self._round_idx, visit.client_id
        return seeded_reading(self._batches(visit, self._round_idx), self._loader.num_workers, *purpose)

    def _batches(self, visit: Visit, round_idx: int) -> list[Any]:
        if visit.split != "train":
            raise ValueError(
                f"a visit to client {visit.client_id} trains on {visit.split!r} data, which a loader of one's own does not "
                "have: use a datamodule that makes them, such as SyntheticInstructionDataModule"
            )
        own = self._indices[visit.client_id]
        return self._reading.batches(visit.client_id, own, round_idx, visit.num_batches)


def _single_loader(given: Any) -> DataLoader:
    if isinstance(given, CombinedLoader):
        given = given.iterables
    if isinstance(given, (list, tuple, Mapping)) and any(
        isinstance(one, DataLoader) for one in _parts(given)
    ):
        raise ValueError(
            f"the training data are a {type(given).__name__} of {len(given)} loaders, and a client's visit reads one: give "
            "one DataLoader over one data set, such as a torch StackDataset of theirs"
        )
    if not isinstance(given, DataLoader):
        raise ValueError(
            f"the training data are a {type(given).__name__}, in which no example can be said to be a client's: give a "
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
            f"the training set {name} has no length, so nobody can say whose example is whose: add __len__"
        )
    return given


def _parts(given: Any) -> list[Any]:
    return [*given.values()] if isinstance(given, Mapping) else [*given]
