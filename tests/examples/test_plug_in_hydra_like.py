"""A project with folders, configs, a LightningCLI and callbacks of its own is federated by a second config alone."""

import ast
import os
import sys
from pathlib import Path

import pytest
import torch
from tiny_world import table

FOLDER = Path(__file__).parents[2] / "examples" / "hydra_like"
ROUNDS = 4


@pytest.fixture(scope="module")
def project():
    """The project's `main`, as `python train.py` has it.

    Its modules stay: jsonargparse looks for short names among all classes there are, and imports the files of these.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        import train

        yield train.main


@pytest.fixture(scope="module")
def fit(project, tmp_path_factory):
    """Runs `python train.py fit` in an empty folder; gives the folder of the run and the command line's objects."""

    def run(name, *arguments, epochs):
        folder = tmp_path_factory.getbasetemp() / f"hydra_like_{name}"
        folder.mkdir(exist_ok=True)
        argv = ["train.py", "fit", f"--config={FOLDER / 'configs/digits.yaml'}", *arguments]
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.setattr(sys, "argv", [*argv, f"--trainer.max_epochs={epochs}"])
            patch.setitem(os.environ, "PL_GLOBAL_SEED", "0")  # seeded by the run; put back afterwards
            patch.setitem(os.environ, "PL_SEED_WORKERS", "0")
            return folder / "runs/digits", project()

    return run


FEDERATED = f"--config={FOLDER / 'configs/federated.yaml'}"


@pytest.fixture(scope="module")
def federated(fit):
    return fit("federated", FEDERATED, epochs=ROUNDS)


def accuracy(cli):
    return cli.trainer.callback_metrics["val/acc"].item()


def test_without_the_second_config_it_trains_as_ever(fit):
    folder, cli = fit("central", epochs=1)
    assert accuracy(cli) > 0.7  # chance is 0.1
    assert not (folder / "visits.csv").exists()
    assert type(cli.trainer.datamodule).__name__ == "DigitsDataModule"


def test_with_it_clients_train_it(federated):
    folder, cli = federated
    visits = table(folder / "visits.csv")
    assert {row["round"] for row in visits} == {str(i) for i in range(ROUNDS)}
    assert len(visits) == 10 * ROUNDS
    assert {row["steps"] for row in visits} == {"5"}
    assert len({row["client"] for row in visits}) > 25
    assert accuracy(cli) > 0.2


def test_its_own_callbacks_see_rounds_and_its_metrics_stand_beside_those_of_the_federation(federated):
    folder, cli = federated
    printer, stopping = (
        next(c for c in cli.trainer.callbacks if type(c).__name__ == name)
        for name in ("MetricsPrinter", "EarlyStopping")
    )
    assert len(printer.lines) == ROUNDS
    assert printer.lines[-1].endswith(f"val/acc {accuracy(cli):.3f}")
    assert stopping.best_score.item() >= accuracy(cli)
    kept = torch.load(folder / "checkpoints/best.ckpt", weights_only=True)["state_dict"]["net.1.weight"]
    assert kept.shape == (64, 64)
    schedule = cli.trainer.lr_scheduler_configs[0].scheduler
    assert (schedule.T_max, schedule.last_epoch) == (ROUNDS, ROUNDS)  # the link of their command line
    folder, _ = federated
    names = set(table(folder / "metrics/version_0/metrics.csv")[0])
    assert {"train/loss", "train/acc", "val/loss", "val/acc", "fed/loss", "fed/bytes_up"} <= names


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_it_goes_on_from_a_checkpoint(federated, fit):
    folder, _ = federated
    last = folder / "checkpoints/last.ckpt"
    copy = torch.load(last, weights_only=True)
    done = copy["callbacks"]["FederatedLoop"]["rounds_done"]  # last.ckpt is written with the best one
    assert 1 < done <= ROUNDS
    again, resumed = fit("federated", FEDERATED, f"--ckpt_path={last}", epochs=ROUNDS + 1)
    assert again == folder
    assert len(table(folder / "visits.csv")) == 10 * (ROUNDS + 1)
    printer = next(c for c in resumed.trainer.callbacks if type(c).__name__ == "MetricsPrinter")
    assert [line.split(":")[0] for line in printer.lines] == [f"epoch {i}" for i in range(done, ROUNDS + 1)]


def test_what_the_trainer_was_given_is_back_afterwards(federated, monkeypatch):
    folder, cli = federated
    monkeypatch.chdir(folder.parents[1])
    assert type(cli.trainer.datamodule).__name__ == "DigitsDataModule"
    cli.trainer.test(cli.model, datamodule=cli.datamodule, verbose=False)
    assert cli.trainer.callback_metrics["test/acc"].item() > 0.2


def test_no_file_of_the_project_knows_of_fedlight():
    files = [*FOLDER.glob("src/**/*.py"), FOLDER / "train.py", FOLDER / "configs/digits.yaml"]
    assert len(files) > 8
    for file in files:
        text = file.read_text()
        assert "fedlight" not in (ast.dump(ast.parse(text)) if file.suffix == ".py" else text)
