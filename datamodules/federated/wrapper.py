"""Any datamodule, federated, without a callback of its own: what stands in ``fit(model, datamodule=...)``."""

from collections.abc import Callable, Mapping
from typing import Any

import lightning as L

from fedlight.datamodules.federated.client_reading import MakeBatches
from fedlight.datamodules.federated.loader_by_client import LoaderByClient


class FederatedWrapper(L.LightningDataModule):
    """An ordinary datamodule, and the word whose training example is whose.

    As soon as a trainer takes it, it steps aside: ``trainer.datamodule`` is the wrapped datamodule itself, with its hooks,
    state, hyperparameters and loaders, and the trainer reads the batches of its training loader by client. Without a
    `FederatedLoop` the wrapped datamodule trains centrally, as it would without the wrapper.

    Args:
        datamodule: whose ``train_dataloader()`` is one loader over a map-style data set.
        clients, seed, batch_sampler: see `ByClient`.
    """

    def __init__(
        self,
        datamodule: L.LightningDataModule,
        clients: Callable[[Any], Mapping[Any, Any]],
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
        """The wrapped datamodule's."""
        return self.datamodule.trainer

    @trainer.setter
    def trainer(self, trainer: L.Trainer | None) -> None:
        # Lightning sets this last when it attaches a datamodule; so the wrapped one is attached in its place.
        if trainer is not None:
            connector = trainer._data_connector
            assert connector._datahook_selector is not None
            connector.attach_datamodule(connector._datahook_selector.model, self.datamodule)
            LoaderByClient(trainer, self.clients, self.seed, self.batch_sampler)
