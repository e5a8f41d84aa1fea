"""Classification with any network, any optimizer, and torchmetrics."""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

Batch = list[torch.Tensor]


class Classifier(L.LightningModule):
    """Cross-entropy, with a cosine schedule over the epochs.

    Args:
        net: gives logits of the classes.
        optimizer: called with the parameters.
        classes: number of classes.
        epochs: length of the schedule.
    """

    def __init__(
        self,
        net: nn.Module,
        optimizer: OptimizerCallable = torch.optim.SGD,
        classes: int = 10,
        epochs: int = 10,
    ) -> None:
        super().__init__()
        self.net = net
        self.optimizer = optimizer
        self.epochs = epochs
        self.train_acc = MulticlassAccuracy(classes, average="micro")
        self.val_acc = MulticlassAccuracy(classes, average="micro")
        self.test_acc = MulticlassAccuracy(classes, average="micro")

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """Cross-entropy; the accuracy is that of the whole epoch."""
        logits = self.net(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        self.train_acc(logits, batch[1])
        self.log("train/loss", loss, on_step=False, on_epoch=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Loss and accuracy."""
        logits = self.net(batch[0])
        self.val_acc(logits, batch[1])
        self.log("val/loss", nn.functional.cross_entropy(logits, batch[1]))
        self.log("val/acc", self.val_acc, prog_bar=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Accuracy."""
        self.test_acc(self.net(batch[0]), batch[1])
        self.log("test/acc", self.test_acc)

    def configure_optimizers(self) -> dict[str, Any]:
        """The given optimizer, its learning rate falling to zero."""
        optimizer = self.optimizer(self.parameters())
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.epochs)
        return {"optimizer": optimizer, "lr_scheduler": schedule}
