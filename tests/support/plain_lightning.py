"""An ordinary module and datamodule that know nothing of federation, and small helpers around them."""

import lightning as L
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedlight.callbacks.loop.federated_loop import FederatedLoop
from fedlight.datamodules.federated.by_client import FederatedWrapper
from fedlight.federation.algorithms.fedavg import FedAvg


class Block(nn.Module):
    """Layer of a small deep network."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.inner(x))


class Regression(L.LightningModule):
    """Dropout makes the random stream matter; AdamW makes the moments matter."""

    def __init__(self, optimizer="AdamW", lr=0.05, dropout=0.3, norm=False):
        super().__init__()
        self.net = nn.Sequential(  # before batch norm a bias has gradients of rounding errors alone
            nn.Linear(4, 8, bias=not norm),
            nn.BatchNorm1d(8) if norm else nn.Tanh(),
            nn.Dropout(dropout),
            nn.Linear(8, 1),
        )
        self.optimizer, self.lr = optimizer, lr

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr=self.lr)


class Uploads(L.Callback):
    """Everything that clients have sent."""

    def __init__(self):
        self.seen = []

    def on_upload(self, upload):
        self.seen.append(upload)


class Backwards(FedAvg):
    """Clients in the other order."""

    def plan(self, round_idx, cohort, num_batches):
        return super().plan(round_idx, cohort, num_batches)[::-1]


class States(L.Callback):
    """What reached the server of each client: (round, client) -> parameters."""

    def __init__(self):
        self.seen = {}

    def on_upload(self, upload):
        assert (upload.round_idx, upload.client_id) not in self.seen
        self.seen[upload.round_idx, upload.client_id] = upload.state


class Metrics(L.Callback):
    """What is logged after each round, of names with one of ``parts`` in them."""

    def __init__(self, *parts):
        self.parts, self.rounds = parts or ("",), []

    def on_train_epoch_end(self, trainer, pl_module):
        metrics = trainer.callback_metrics
        names = [name for name in metrics if any(part in name for part in self.parts)]
        self.rounds.append({name: float(metrics[name]) for name in names})


class Numbers(L.LightningDataModule):
    def setup(self, stage):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(120, 4, generator=generator)
        self.data = TensorDataset(x, x.sum(1, keepdim=True))

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=4, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.data, batch_size=60)


def ten_clients(dataset):
    """Of 3 to 21 examples, named so that their order is not the order of their data."""
    cuts = np.cumsum([0, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21])
    return {f"c{(7 * i) % 10}": np.arange(cuts[i], cuts[i + 1]) for i in range(10)}


def trainer(rounds=3, callbacks=(), **kwargs):
    kwargs.setdefault("enable_checkpointing", False)
    kwargs.setdefault("logger", False)
    kwargs.setdefault("enable_progress_bar", False)
    return L.Trainer(
        max_epochs=rounds, accelerator="cpu", enable_model_summary=False, callbacks=list(callbacks), **kwargs
    )


def module(seed=0, **kwargs):
    L.seed_everything(seed, verbose=False)
    return Regression(**kwargs)


def seeded(kind, *args, **kwargs):
    """A module whose first weights follow from seed 0."""
    L.seed_everything(0, verbose=False)
    return kind(*args, **kwargs)


def weights(of):
    return {name: p.detach().cpu().clone() for name, p in of.named_parameters()}


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name].cpu(), b[name].cpu()), name


def federate(rounds=3, clients=ten_clients, model=None, callbacks=(), settings=None, **loop):
    loop = FederatedLoop(**({"clients_per_round": 3, "local_steps": 2} | loop))
    model = model or module()
    trainer(rounds, [loop, *callbacks], **(settings or {})).fit(model, FederatedWrapper(Numbers(), clients))
    return model, loop
