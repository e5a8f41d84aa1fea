"""The adapter's folder: whole or absent, and refused before training where a module has no adapter."""

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from fedlight.callbacks.export.adapter_export import AdapterExport


class NoAdapter(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1, bias=False)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


class WithAdapter(NoAdapter):
    def save_adapter(self, folder):
        (folder / "weights.txt").write_text(str(self.layer.weight.item()))


class FullDisk(NoAdapter):
    def save_adapter(self, folder):
        with open("/dev/full", "w") as file:
            file.write("weights")


def fit(module, folder):
    trainer = L.Trainer(
        max_epochs=1,
        callbacks=[AdapterExport(str(folder))],
        logger=False,
        accelerator="cpu",
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(torch.ones(3, 1)))


def test_holds_the_weights_after_the_last_step(tmp_path):
    module = WithAdapter()
    module.layer.weight.data.fill_(5.0)
    fit(module, tmp_path / "runs" / "adapter")
    assert (tmp_path / "runs" / "adapter" / "weights.txt").read_text() == "2.0"  # three steps of -1
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["adapter"]


def test_replaces_an_older_folder_and_no_other(tmp_path):
    for name in ("adapter", "adapter.tmp", "adapter.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "stale.txt").touch()
    fit(WithAdapter(), tmp_path / "adapter")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "adapter.old", "adapter.tmp"]
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {"README.md", "weights.txt"}


def test_a_failed_export_leaves_the_older_folder(tmp_path):
    fit(WithAdapter(), tmp_path / "adapter")
    with pytest.raises(OSError, match="disk is full while writing"):
        fit(FullDisk(), tmp_path / "adapter")
    assert (tmp_path / "adapter" / "weights.txt").exists()


def test_a_module_without_an_adapter_is_refused_before_training(tmp_path):
    module = NoAdapter()
    before = module.layer.weight.item()
    with pytest.raises(ValueError, match=r"NoAdapter has no method save_adapter\(folder\)"):
        fit(module, tmp_path / "adapter")
    assert module.layer.weight.item() == before
