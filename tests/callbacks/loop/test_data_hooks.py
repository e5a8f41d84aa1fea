import lightning as L
import numpy as np
import pytest
import torch
from fleets import make_fleet
from plain_lightning import trainer
from torch.utils.data import DataLoader, TensorDataset

from fedlight import ByClient, FederatedDataModule, FederatedLoop, FederatedWrapper
from fedlight.callbacks.logs.client_accuracy import outputs_of_own_model
from fedlight.callbacks.loop.run import client_losses

BYTES = torch.arange(8, dtype=torch.uint8)[:, None]
HALVES = {"a": np.arange(4), "b": np.arange(4, 8)}


class Line(L.LightningModule):
    """y = 2 x, learned from nothing but floats."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1, bias=False)

    def training_step(self, batch, batch_idx):
        return self.example_losses(batch).mean()

    def test_step(self, batch, batch_idx):
        return self.layer(batch[0])

    validation_step = None

    def example_losses(self, batch):
        return (self.layer(batch[0]) - 2 * batch[0]).square().flatten()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class FromBytes:
    """Says in hooks what bytes mean: tenths, one more than they say."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] + 1]

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0].float() / 10]


class Data(FromBytes, L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(BYTES), batch_size=4)


class KnownData(FromBytes, FederatedDataModule):
    """The same examples for training, validation and the test."""

    val_client_indices = test_client_indices = client_indices = HALVES

    def setup(self, stage):
        self.train_set = self.val_set = self.test_set = TensorDataset(BYTES)

    def collate(self, examples):
        return [torch.stack([x for (x,) in examples])]


@pytest.mark.parametrize("wrapped", [True, False])
def test_devices_count_the_step_of_a_batch_as_it_comes(tmp_path, wrapped):
    loop = FederatedLoop(clients_per_round=2, local_steps=1, fleet=make_fleet(tmp_path, phone={}))

    def clients(train_set):
        return HALVES

    data, callbacks = (FederatedWrapper(Data(), clients), []) if wrapped else (Data(), [ByClient(clients)])
    trainer(1, [*callbacks, loop]).fit(Line(), data)
    # Forward and the weight's gradient: two products of 4 x 1 by 1 x 1, two operations each.
    assert [row["flops"] for row in loop.visit_records] == [2 * 2 * 4] * 2


@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader` but have no `validation_step`")
def test_clients_are_scored_and_tested_on_what_the_hooks_give():
    loop, model, data = FederatedLoop(clients_per_round=2, local_steps=1), Line(), KnownData(batch_size=4)
    trainer(1, [loop]).fit(model, data)
    data.setup("test")
    x = (BYTES.float() + 1) / 10
    off = model.layer.weight.item() - 2
    expected = {client: ((off * x[own]) ** 2).mean().item() for client, own in HALVES.items()}
    found = {client: own.mean() for client, own in client_losses(model, data).items()}
    assert found == pytest.approx(expected)
    for client, own in HALVES.items():
        outputs = outputs_of_own_model(model.trainer, model, loop, data, client)
        assert torch.allclose(outputs[0], model.layer(x[own]))
