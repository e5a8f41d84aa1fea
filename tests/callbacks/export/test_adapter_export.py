import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from one_weight import OneWeight
from plain_lightning import trainer as make_trainer
from refusals import refusal
from torch.utils.data import DataLoader

from fedlight.callbacks.export.adapter_export import AdapterExport


class NoAdapter(OneWeight):
    """A step moves the weight by -1."""

    validation_step = None

    def training_step(self, batch, batch_idx):
        return (self.weight * batch).mean()


class WithAdapter(NoAdapter):
    def save_adapter(self, folder):
        (folder / "weights.txt").write_text(str(self.weight.item()))


class FullDisk(NoAdapter):
    def save_adapter(self, folder):
        with open("/dev/full", "w") as file:
            file.write("weights")


def fit(module, folder):
    trainer = make_trainer(1, [AdapterExport(str(folder))])
    trainer.fit(module, DataLoader(torch.ones(3, 1)))


def test_holds_the_weights_after_the_last_step(tmp_path):
    module = WithAdapter()
    module.weight.data.fill_(5.0)
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
    with refusal(r"NoAdapter has no method save_adapter\(folder\)"):
        fit(module, tmp_path / "adapter")
    assert module.weight.item() == 0


@pytest.mark.parametrize("folder", ["", ".", "..", "file/adapter"])
def test_a_folder_that_cannot_become_the_adapters_is_refused_before_training(tmp_path, monkeypatch, folder):
    (tmp_path / "here").mkdir()
    (tmp_path / "here/file").touch()
    monkeypatch.chdir(tmp_path / "here")
    module = WithAdapter()
    with pytest.raises(
        (ValueError, OSError), match=r"would take the place of all that is in it|cannot be written"
    ):
        fit(module, folder)
    assert module.weight.item() == 0


class Scored(L.Callback):
    """Logs a score of each epoch after the other callbacks of the list."""

    def __init__(self, scores):
        self.scores = scores

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.callback_metrics["score/x"] = torch.tensor(self.scores[trainer.current_epoch])
        spent = {"fed/epsilon": 2.0 + trainer.current_epoch, "fed/delta": 1e-5}
        trainer.callback_metrics.update({name: torch.tensor(value) for name, value in spent.items()})


def fit_scored(folder, scores, epochs, checkpoint=None, monitor="score/x", every_n_epochs=None):
    keeper = ModelCheckpoint(
        folder / "checkpoints", "{epoch}", "score/x", mode="max", save_top_k=-1, every_n_epochs=every_n_epochs
    )
    module = WithAdapter()
    module.weight.data.fill_(9.0)
    trainer = make_trainer(
        epochs,
        [AdapterExport(str(folder / "adapter"), monitor=monitor), Scored(scores), keeper],
        enable_checkpointing=True,
    )
    trainer.fit(module, DataLoader(torch.ones(1, 1)), ckpt_path=checkpoint)
    return trainer, module


def test_holds_the_weights_of_the_best_epoch_by_a_metric(tmp_path):
    trainer, module = fit_scored(tmp_path, [0.5, 0.75, 0.25], epochs=3)
    assert (tmp_path / "adapter/weights.txt").read_text() == "7.0"  # from 9, after two epochs
    assert module.weight.item() == 7.0
    assert trainer.callback_metrics["exported/epoch"] == 2
    card = (tmp_path / "adapter/README.md").read_text()
    assert "0.75" in card
    assert "0.25" not in card  # the score of the last epoch, whose weights are not in the folder
    assert "| differential privacy | epsilon 4 at delta 1e-05 towards" in card  # of the whole run


def test_without_a_saved_checkpoint_the_last_epoch_is_exported(tmp_path):
    trainer, _ = fit_scored(tmp_path, [0.75, 0.5], epochs=2, every_n_epochs=3)
    assert (tmp_path / "adapter/weights.txt").read_text() == "7.0"
    assert "exported/epoch" not in trainer.callback_metrics


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize("folder", ["run", "moved"])
def test_the_best_epoch_of_a_resumed_run_is_that_of_the_whole_run(tmp_path, folder):
    fit_scored(tmp_path / "run", [0.75, 0.5], epochs=2)
    folder = (tmp_path / "run").rename(tmp_path / folder)
    trainer, _ = fit_scored(folder, [0.75, 0.5, 0.25], 3, checkpoint=folder / "checkpoints/epoch=1.ckpt")
    assert trainer.callback_metrics["exported/epoch"] == 1
    assert (folder / "adapter/weights.txt").read_text() == "8.0"
    assert len(trainer.checkpoint_callback.best_k_models) == 3


def test_a_metric_by_which_no_checkpoint_is_kept_is_refused(tmp_path):
    with refusal(r"AdapterExport.monitor='score/y': no ModelCheckpoint has this monitor"):
        fit_scored(tmp_path, [0.5], epochs=1, monitor="score/y")
