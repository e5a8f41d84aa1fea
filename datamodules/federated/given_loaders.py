"""Loaders that were made by hand, as a datamodule: what stands in ``fit(model, train_loader, val_loader)``."""

import lightning as L
from torch.utils.data import DataLoader

Loaders = DataLoader | list[DataLoader]


class GivenLoaders(L.LightningDataModule):
    """For `FederatedWrapper`, which federates datamodules: ``FederatedWrapper(GivenLoaders(train, val), clients)``.

    Args:
        train: over a map-style data set; read by client as it stands.
        val: a loader or a list of loaders; None: no validation.
        test: likewise.
    """

    def __init__(self, train: DataLoader, val: Loaders | None = None, test: Loaders | None = None) -> None:
        super().__init__()
        self.train, self.val, self.test = train, val, test
        # Not as methods of this class: Lightning warns of a loader for which the module has no step.
        if val is not None:
            self.val_dataloader = lambda: val  # type: ignore[method-assign]
        if test is not None:
            self.test_dataloader = lambda: test  # type: ignore[method-assign]

    def train_dataloader(self) -> DataLoader:
        """As given."""
        return self.train
