"""An ordinary Lightning project on emulated devices: some clients compute in 8 or 4 bits, in pieces, or not at all.

Handwritten digits (scikit-learn), 50 clients. The frozen layers are what devices hold in fewer bits. Two kinds of device
are described in examples/devices: on a board, batches of 32 run in two halves, and a tag has no room for a single example.
The third kind comes with fedlight. Nothing depends on the speed of this machine.
Run: python examples/own_devices.py
"""

from pathlib import Path

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

DEVICES = Path(__file__).parent / "devices"


class DigitsData(L.LightningDataModule):
    """1,797 images of 8 x 8 pixels, in [0, 1]."""

    def setup(self, stage: str) -> None:
        """Splits them into training and validation images."""
        digits = load_digits()
        images = torch.tensor(digits.data, dtype=torch.float32) / 16
        everything = TensorDataset(images, torch.tensor(digits.target))
        self.train_set, self.val_set = random_split(everything, [0.8, 0.2], torch.Generator().manual_seed(0))

    def train_dataloader(self) -> DataLoader:
        """Batches of 32."""
        return DataLoader(self.train_set, batch_size=32, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """All at once."""
        return DataLoader(self.val_set, batch_size=len(self.val_set))


class DigitsModule(L.LightningModule):
    """Two trained layers around a frozen block; its loss is a mean over the examples."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(64, 64)
        self.block = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
        self.block.requires_grad_(False)
        self.head = nn.Linear(64, 10)

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        """``(batch, 64)`` to ``(batch, 10)``."""
        hidden = torch.relu(self.start(images))
        return self.head(hidden + self.block(hidden))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Cross-entropy."""
        return nn.functional.cross_entropy(self.logits(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        """Accuracy."""
        self.log("val/accuracy", (self.logits(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.5)


def federate(rounds: int = 30, folder: str = "runs/own_devices") -> float:
    """Thirteen clients are asked in a round, the ten fastest count; gives the global model's accuracy, unquantized."""
    from fedlight.callbacks.logs.visit_log import VisitLog
    from fedlight.callbacks.loop.federated_loop import FederatedLoop
    from fedlight.datamodules.clients.partition import dirichlet
    from fedlight.datamodules.federated.by_client import FederatedWrapper
    from fedlight.devices.fleet import Fleet

    def clients(train_set: torch.utils.data.Subset) -> dict:
        labels = train_set.dataset.tensors[1][train_set.indices].numpy()
        return dirichlet(labels, num_clients=50, alpha=0.3, seed=0, min_size=2)

    fleet = Fleet(
        {str(DEVICES / "board.yaml"): 0.6, str(DEVICES / "tag.yaml"): 0.2, "raspberry_pi_5": 0.2},
        over_selection=1.3,
    )
    loop = FederatedLoop(clients_per_round=10, local_steps=10, fleet=fleet)
    trainer = L.Trainer(
        max_epochs=rounds,
        devices=1,
        callbacks=[loop, VisitLog()],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(DigitsModule(), datamodule=FederatedWrapper(DigitsData(), clients))
    return trainer.callback_metrics["val/accuracy"].item()


if __name__ == "__main__":
    L.seed_everything(0)
    print(f"accuracy after 30 rounds: {federate():.3f}; each visit in runs/own_devices/visits.csv")
