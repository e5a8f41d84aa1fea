"""A script with loaders and a Trainer made by hand is federated by a few callbacks; the script itself is not touched."""

import ast
import os
import runpy
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny_world import table

FOLDER = Path(__file__).parents[2] / "examples" / "script_style"


@pytest.fixture(scope="module")
def scripts():
    """The two scripts as modules, without what they do when they are run; they stay, as a short name may be sought there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        import characters
        import federated
    return characters, federated


@pytest.fixture(autouse=True)
def seeds_stay(monkeypatch):
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setitem(os.environ, name, "0")


def trainer(folder, rounds, callbacks):
    quiet = {"logger": False, "log_every_n_steps": 1, "enable_model_summary": False}
    place = {"accelerator": "cpu", "default_root_dir": folder}
    return L.Trainer(max_epochs=rounds, callbacks=callbacks, enable_progress_bar=True, **place, **quiet)


def fitted(scripts, folder, rounds, ckpt_path=None):
    characters, federated = scripts
    L.seed_everything(0, verbose=False)
    saving = ModelCheckpoint(folder / "kept", filename="{epoch}", save_top_k=-1)
    run = trainer(folder, rounds, [*federated.federation(), saving])
    model = characters.CharacterModel(lr=1.0)
    run.fit(model, characters.train_loader, characters.val_loader, ckpt_path=ckpt_path, weights_only=True)
    return model, run


def test_the_script_runs_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran = runpy.run_path(str(FOLDER / "characters.py"), run_name="__main__")
    metrics = ran["trainer"].callback_metrics
    assert metrics["val/accuracy"] > 0.2  # the likeliest character, a blank, is every sixth
    (file,) = tmp_path.glob("runs/characters/**/metrics.csv")
    losses = [float(row["val/loss"]) for row in table(file) if row["val/loss"]]
    assert len(losses) == 3
    assert losses[-1] < losses[0]


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_each_source_is_a_client_and_a_resumed_run_is_the_same(scripts, tmp_path):
    characters, _ = scripts
    whole, run = fitted(scripts, tmp_path / "whole", rounds=3)
    visits = table(tmp_path / "whole/visits.csv")
    assert {row["client"] for row in visits} <= set(characters.MODULES)
    assert len(visits) == 3 * 8
    assert run.callback_metrics["val/accuracy"] > 0.1
    assert run.train_dataloader is not characters.train_loader

    fitted(scripts, tmp_path / "part", rounds=2)
    (checkpoint,) = (tmp_path / "part/kept").glob("epoch=1.ckpt")
    resumed, _ = fitted(scripts, tmp_path / "part", rounds=3, ckpt_path=checkpoint)
    assert (tmp_path / "part/visits.csv").read_text().count("\n") == 1 + 3 * 8
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_data_that_cannot_be_shared_out_is_refused(scripts, tmp_path):
    characters, federated = scripts

    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(torch.zeros(4, 5, dtype=torch.long))

    endless = torch.utils.data.DataLoader(Endless(), batch_size=2)
    run = trainer(tmp_path, 1, federated.federation())
    with pytest.raises(ValueError, match="iterable data set Endless, whose examples have no positions"):
        run.fit(characters.CharacterModel(), endless, characters.val_loader)


def test_few_lines_are_added_and_the_script_does_not_know():
    assert "fedlight" not in ast.dump(ast.parse((FOLDER / "characters.py").read_text()))
    tree = ast.parse((FOLDER / "federated.py").read_text())
    added = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert sum(len(node.body) - 1 for node in added) == 2  # a line each, below its docstring
