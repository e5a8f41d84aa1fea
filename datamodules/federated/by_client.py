"""Ways to federate a Lightning project's own training data: a callback, a wrapped datamodule, loaders made by hand."""

from typing import Any

import lightning as L
from torch.utils.data import DataLoader

from fedlight.datamodules.federated.loader_by_client import ClientsOfData, LoaderByClient, MakeBatches
from fedlight.federation.protocols import FederatedData, TrainsRounds
from fedlight.support.checks import Checked
from fedlight.support.pokes import attach_datamodule, training_source

Loaders = DataLoader | list[DataLoader]


class ByClient(Checked, L.Callback):
    """Callback that has the trainer read its training data client after client; its place among the callbacks is free.

    Only the source of the training batches is replaced: hooks, state, hyperparameters and validation loaders stay.

    Args:
        clients: client id -> positions of the client's examples, or a function from the training set to such a mapping, for
            example `PartitionByField`. An id is a text or a whole number; positions are a sequence of whole numbers, or
            a mask.
        seed: seed of the order of the examples.
        batch_sampler: function from a client's own data set to its batch sampler, for a training loader whose batch sampler
            or sampler needs the whole data set.

    Raises:
        ValueError: in ``setup``, without a `FederatedLoop` or with a datamodule that has clients already; before training,
            for data that cannot be read by client; see `fedlight.datamodules.federated.loader_by_client`.

    Examples:
        >>> import torch
        >>> from fedlight import FederatedLoop, Partition, PartitionByField
        >>> halves = PartitionByField(Partition(by="iid", num_clients=2))
        >>> callbacks = [ByClient(halves), FederatedLoop(clients_per_round=2, local_steps=3)]
    """

    def __init__(
        self, clients: ClientsOfData, seed: int = 0, batch_sampler: MakeBatches | None = None
    ) -> None:
        self.clients, self.seed, self.batch_sampler = clients, seed, batch_sampler
        self._source: LoaderByClient | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if not any(isinstance(callback, TrainsRounds) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            raise ValueError(
                "ByClient assigns examples to clients, but nothing trains by client: add FederatedLoop to the trainer's "
                "callbacks, or remove ByClient to train centrally"
            )
        self.share_out(trainer)

    def share_out(self, trainer: L.Trainer) -> None:
        """Replace the source of the training batches, once; called by whichever of the two callbacks comes first."""
        source = training_source(trainer)
        if source is self._source:  # the other callback called it before
            return
        datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
        for other, assigns in (
            (type(datamodule).__name__, isinstance(datamodule, FederatedData)),
            ("another ByClient or FederatedWrapper", isinstance(source, LoaderByClient)),
        ):
            if assigns:
                raise ValueError(f"ByClient and {other} both assign examples to clients: remove ByClient")
        self._source = LoaderByClient(trainer, self.clients, self.seed, self.batch_sampler)


class FederatedWrapper(Checked, L.LightningDataModule):
    """Ordinary datamodule with a function that assigns its training examples to clients.

    Once a trainer attaches the wrapper, ``trainer.datamodule`` is the wrapped datamodule itself, and the trainer reads its
    training loader by client. Without a `FederatedLoop` it trains centrally, as without the wrapper.

    Args:
        datamodule: datamodule whose ``train_dataloader()`` is one loader over a map-style data set.
        clients, seed, batch_sampler: see `ByClient`.
    """

    def __init__(
        self,
        datamodule: L.LightningDataModule,
        clients: ClientsOfData,
        seed: int = 0,
        batch_sampler: MakeBatches | None = None,
    ) -> None:
        self.datamodule = datamodule
        super().__init__()
        self.clients = clients
        self.seed = seed
        self.batch_sampler = batch_sampler

    @property
    def trainer(self) -> L.Trainer | None:
        """Trainer of the wrapped datamodule."""
        return self.datamodule.trainer

    @trainer.setter
    def trainer(self, trainer: L.Trainer | None) -> None:
        # Lightning sets this last when it attaches a datamodule; so the wrapped one is attached in its place.
        if trainer is not None:
            attach_datamodule(trainer, self.datamodule)
            LoaderByClient(trainer, self.clients, self.seed, self.batch_sampler)


class GivenLoaders(L.LightningDataModule):
    """Datamodule of loaders made by hand, for `FederatedWrapper`: ``FederatedWrapper(GivenLoaders(train, val), clients)``.

    Args:
        train: loader over a map-style data set.
        val: a loader or a list of loaders; None: no validation.
        test: a loader or a list of loaders; None: no test.
    """

    def __init__(self, train: DataLoader, val: Loaders | None = None, test: Loaders | None = None) -> None:
        super().__init__()
        self.train, self.val, self.test = train, val, test
        # Not as methods of this class: Lightning warns of a loader without a step of the module.
        if val is not None:
            self.val_dataloader = lambda: val  # type: ignore[method-assign]
        if test is not None:
            self.test_dataloader = lambda: test  # type: ignore[method-assign]

    def train_dataloader(self) -> DataLoader:
        return self.train
