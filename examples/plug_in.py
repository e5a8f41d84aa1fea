"""Federates an ordinary Lightning project: its module and datamodule do not mention fedlight.

Handwritten digits (scikit-learn), 50 clients whose label mixtures come from a Dirichlet distribution.
Run: python examples/plug_in.py
"""

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class DigitsData(L.LightningDataModule):
    """1,797 images of 8 x 8 pixels, in [0, 1]."""

    def setup(self, stage: str) -> None:
        """Splits them into training and validation images."""
        digits = load_digits()
        images = torch.tensor(digits.data, dtype=torch.float32) / 16
        everything = TensorDataset(images, torch.tensor(digits.target))
        self.train_set, self.val_set = random_split(everything, [0.8, 0.2], torch.Generator().manual_seed(0))

    def train_dataloader(self) -> DataLoader:
        """Batches of 16."""
        return DataLoader(self.train_set, batch_size=16, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """All at once."""
        return DataLoader(self.val_set, batch_size=len(self.val_set))


class DigitsModule(L.LightningModule):
    """A small classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Cross-entropy."""
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        """Accuracy."""
        self.log("val/accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.2)


def federate(rounds: int = 30) -> float:
    """All that is added to the project; gives the accuracy of the global model on the validation images."""
    from fedlight.callbacks.loop.federated_loop import FederatedLoop
    from fedlight.datamodules.clients.partition import dirichlet
    from fedlight.datamodules.federated.by_client import FederatedWrapper

    def clients(train_set: torch.utils.data.Subset) -> dict:
        labels = train_set.dataset.tensors[1][train_set.indices].numpy()
        return dirichlet(labels, num_clients=50, alpha=0.3, seed=0, min_size=2)

    loop = FederatedLoop(clients_per_round=10, local_steps=10)
    trainer = L.Trainer(
        max_epochs=rounds, devices=1, callbacks=[loop], logger=False, enable_checkpointing=False
    )
    trainer.fit(DigitsModule(), datamodule=FederatedWrapper(DigitsData(), clients))
    return trainer.callback_metrics["val/accuracy"].item()


if __name__ == "__main__":
    L.seed_everything(0)
    print(f"accuracy after 30 rounds: {federate():.3f}")
