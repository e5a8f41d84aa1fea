"""A project's own training data, by client: with `FederatedLoop`, all that a trainer of one's own takes."""

from collections.abc import Callable, Mapping
from typing import Any

import lightning as L

from fedlight.datamodules.federated.client_reading import MakeBatches
from fedlight.datamodules.federated.loader_by_client import LoaderByClient
from fedlight.federation.protocols import FederatedData, TrainsRounds


class ByClient(L.Callback):
    """Has the trainer read its training data client after client; before or behind `FederatedLoop` among the callbacks.

    Only the source of the training batches is replaced. The datamodule with its hooks, state and hyperparameters, and the
    loaders for validation, are those that the trainer was given.

    Args:
        clients: training set -> client id -> positions of its examples, such as `PartitionByField`, or a function of one's
            own. An id is a text or a whole number; positions are any sequence of whole numbers, or a mask.
        seed: of the order of the examples.
        batch_sampler: a client's own data set -> its batch sampler, for a training loader whose batch sampler or sampler
            knows the whole data set only.

    Raises:
        ValueError: in ``setup``, without a `FederatedLoop` or for a datamodule that knows its clients itself; before
            training, for data that cannot be read by client; see `fedlight.datamodules.federated.loader_by_client`.

    Example:
        >>> import torch
        >>> from fedlight import FederatedLoop, Partition, PartitionByField
        >>> halves = PartitionByField(Partition(by="iid", num_clients=2))
        >>> callbacks = [ByClient(halves), FederatedLoop(clients_per_round=2, local_steps=3)]
    """

    def __init__(
        self,
        clients: Callable[[Any], Mapping[Any, Any]],
        seed: int = 0,
        batch_sampler: MakeBatches | None = None,
    ) -> None:
        self.clients = clients
        self.seed = seed
        self.batch_sampler = batch_sampler
        self._source: LoaderByClient | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Puts the clients' data in the place of the training loader."""
        if stage != "fit":
            return
        if not any(isinstance(callback, TrainsRounds) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            raise ValueError(
                "ByClient says whose example is whose, but nothing trains by client: add FederatedLoop to the trainer's "
                "callbacks, or take ByClient out to train centrally"
            )
        self.share_out(trainer)

    def share_out(self, trainer: L.Trainer) -> None:
        """The same, once: whichever of the two callbacks comes first asks for it."""
        now = trainer.fit_loop._data_source
        if now is self._source:
            return
        given: Any = trainer.datamodule  # type: ignore[attr-defined]
        for other, said in (
            (type(given).__name__, isinstance(given, FederatedData)),
            ("another ByClient or FederatedWrapper", isinstance(now, LoaderByClient)),
        ):
            if said:
                raise ValueError(f"ByClient and {other} both say whose example is whose: take ByClient out")
        self._source = LoaderByClient(trainer, self.clients, self.seed, self.batch_sampler)
