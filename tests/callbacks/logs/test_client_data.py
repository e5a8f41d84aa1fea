import logging

import lightning as L
import numpy as np
import torch
from one_weight import OneWeight
from plain_lightning import trainer as make_trainer
from torch.utils.data import DataLoader

from fedlight.callbacks.logs.client_data import ClientData
from fedlight.datamodules.federated.datamodule import FederatedDataModule


class Fruit(FederatedDataModule):
    """Five examples of two clients, three of which are apples."""

    def __init__(self, labels) -> None:
        super().__init__(batch_size=2)
        self.train_set = torch.ones(5, 1)
        self.client_indices = {"u": np.array([0, 2, 4]), "v": np.array([1, 3])}
        self.val_client_indices = {"u": np.array([0])}
        self.train_labels = labels

    def collate(self, examples):
        return torch.stack(examples)


def fit(folder, data):
    trainer = make_trainer(1, [ClientData()], default_root_dir=folder, limit_val_batches=0)
    trainer.fit(OneWeight(), data)


def test_examples_are_counted_by_client_label_and_split(tmp_path):
    fit(tmp_path, Fruit(["apple", "pear", "apple", "apple", "pear"]))
    assert (tmp_path / "data.csv").read_text().splitlines() == [
        "client,label,split,rows",
        "u,apple,train,2",
        "u,pear,train,1",
        "v,apple,train,1",
        "v,pear,train,1",
        "u,,val,1",
    ]


def test_without_labels_clients_have_sizes_and_a_second_run_writes_the_file_anew(tmp_path):
    fit(tmp_path, Fruit(["apple"] * 5))
    fit(tmp_path, Fruit(None))
    assert (tmp_path / "data.csv").read_text().splitlines()[1:3] == ["u,,train,3", "v,,train,2"]
    assert [file.name for file in tmp_path.iterdir()] == ["data.csv"]


def test_data_without_clients_are_named_and_nothing_is_written(tmp_path, caplog):
    class Plain(L.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(torch.ones(2, 1))

        val_dataloader = train_dataloader

    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        fit(tmp_path, Plain())
    assert "the client of a training example is not known" in caplog.text
    assert not (tmp_path / "data.csv").exists()
