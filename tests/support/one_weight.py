"""A module of one weight for tests of callbacks, and a callback that keeps outputs."""

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device


class OneWeight(L.LightningModule):
    """A weight of 0 and SGD; losses are the sums of the batches, without a gradient."""

    def __init__(self, lr=1.0):
        super().__init__()
        self.weight, self.lr = torch.nn.Parameter(torch.zeros(1)), lr

    def training_step(self, batch, batch_idx):
        return self.weight.sum() * 0 + batch.sum()

    def validation_step(self, batch, batch_idx):
        """Let Lightning validate without a warning."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Outputs(L.Callback):
    """Keeps the outputs of validation and test steps."""

    def __init__(self):
        self.seen = []

    def on_validation_batch_end(self, trainer, pl_module, outputs, *rest):
        self.seen.append(move_data_to_device(outputs, "cpu"))

    on_test_batch_end = on_validation_batch_end
