"""A federation of nine clients with three tastes, and linear models as the adapters of one module."""

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from plain_lightning import trainer
from torch import nn
from torch.utils.data import TensorDataset

from fedlight.callbacks.loop.federated_loop import FederatedLoop
from fedlight.datamodules.federated.datamodule import FederatedDataModule

SIGNS = {f"c{i}": (-1, 1, 3)[i % 3] for i in range(9)}  # three tastes


class Adapters(L.LightningModule):
    """Linear models that start equal, one of them active."""

    def __init__(self, count=3, optimizer="SGD"):
        super().__init__()
        self.adapter_names = [f"adapter{i}" for i in range(count)] if count > 1 else ["default"]
        self.parts = nn.ModuleDict({name: nn.Linear(4, 1) for name in self.adapter_names})
        generator = torch.Generator().manual_seed(0)
        for part in self.parts.values():
            nn.init.constant_(part.bias, 0.0)
            part.weight.data = 0.1 * torch.randn(1, 4, generator=generator.manual_seed(0))
        self.active, self.kind = self.adapter_names[0], optimizer

    def use_adapter(self, name):
        self.active = name

    def example_losses(self, batch):
        return (self.parts[self.active](batch[0]) - batch[1]).square()[:, 0]

    def training_step(self, batch, batch_idx):
        return self.example_losses(batch).mean()

    def validation_step(self, batch, batch_idx):
        """Lightning warns of validation data that nobody looks at."""

    def configure_optimizers(self):
        return getattr(torch.optim, self.kind)(self.parameters(), lr=0.05)


class Spread(Adapters):
    """Selectors that start apart: they suit the tastes, in another order."""

    def __init__(self, count=3):
        super().__init__(count)
        for part, sign in zip(self.parts.values(), (1.2, 2.6, -0.7), strict=False):
            nn.init.constant_(part.weight, sign)

    def start(self):
        return [
            {name: p.detach().clone() for name, p in part.named_parameters()} for part in self.parts.values()
        ]


class Tastes(FederatedDataModule):
    """Nine clients of unequal size; y is the sum of x, times the client's sign."""

    def setup(self, stage):
        generator = torch.Generator().manual_seed(0)
        x, y, self.client_indices, self.val_client_indices = [], [], {}, {}
        for i, (client, sign) in enumerate(SIGNS.items()):
            own = torch.randn(7 + i, 4, generator=generator)
            start = sum(len(part) for part in x)
            x.append(own)
            y.append(sign * own.sum(1, keepdim=True))
            self.client_indices[client] = np.arange(start, start + len(own) - 4)
            self.val_client_indices[client] = np.arange(start + len(own) - 4, start + len(own))
        self.train_set = self.val_set = TensorDataset(torch.cat(x), torch.cat(y))

    def collate(self, examples):
        return [torch.stack(column) for column in zip(*examples, strict=True)]


def run(algorithm, rounds=6, module=None, callbacks=(), ckpt_path=None, **loop):
    module = module or Adapters()
    loop = FederatedLoop(algorithm, **{"clients_per_round": 4, "local_steps": 3, "seed": 1, **loop})
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    t = trainer(rounds, [loop, *callbacks], enable_checkpointing=saves, limit_val_batches=0)
    t.fit(module, datamodule=Tastes(batch_size=4), ckpt_path=ckpt_path, weights_only=True)
    return module, loop


def stepped(w, batches, lr=0.05):
    """Plain SGD of a linear model on the mean squared error, written out; ``w`` has its weight and bias."""
    for x, y in batches:
        w = {name: value.detach().requires_grad_() for name, value in w.items()}
        loss = (x @ w["weight"].T + w["bias"] - y).square().mean()
        gradients = torch.autograd.grad(loss, [*w.values()])
        w = {name: (w[name] - lr * g).detach() for name, g in zip(w, gradients, strict=True)}
    return w
