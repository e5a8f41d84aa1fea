import json
import os
import shutil
import signal
from pathlib import Path

import lightning as L
import pytest
import torch
from killed import CODES, KILLED, SIGNALS, STOPPED, TERMINATED, Child, at
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger
from recipe_runs import ran
from tiny_world import fedlight, refused, table, tiny_selector

from fedlight.callbacks.loop.federated_loop import FederatedLoop
from fedlight.export.opened import open_run
from fedlight.lightning_cli.cli import lightning_cli
from fedlight.lightning_cli.run_record import recorded
from fedlight.lightning_cli.second_fit import FitFolder, checkpoints_of, compared
from fedlight.runs.run import read_runs

REMEDY = "start over with --resume false, or choose another --trainer.default_root_dir"


@pytest.fixture
def data(tmp_path):
    file = tmp_path / "data.csv"
    file.write_text("1\n")
    os.utime(file, (1, 1))
    return file


@pytest.fixture
def settings(tmp_path, data):
    """Settings of a command, with changes by their keys."""

    def of(epochs=3, lr=0.1, folder=tmp_path / "run", **trainer):
        return {
            "trainer": {"max_epochs": epochs, "default_root_dir": str(folder), **trainer},
            "model": {"class_path": "a.Module", "init_args": {"lr": lr}},
            "data": {"class_path": "a.Data", "init_args": {"source": str(data), "num_workers": 0}},
            "federated": {"class_path": "fedlight.FederatedLoop", "init_args": {"seed": 0, "memory": None}},
            "ckpt_path": None,
        }

    return of


@pytest.fixture
def run(tmp_path, settings):
    """A run in ``run`` that has ended somehow, with its checkpoints."""
    folder = tmp_path / "run"
    folder.mkdir()

    def of(state="done", epochs=3, checkpoints=1, **given):
        FitFolder(folder, settings(**given), []).begin(starts_over=False, given=None)
        try:
            with recorded(folder, "fit", ["fit"], 0) as ended:
                ended["epochs"] = epochs
                if state == "stopped":
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass
        return [write_checkpoint(folder, number) for number in range(checkpoints)]

    return of


def write_checkpoint(folder: Path, epoch: int) -> Path:
    file = folder / f"checkpoints/epoch={epoch}.ckpt"
    file.parent.mkdir(exist_ok=True)
    content = {"state_dict": {}, "optimizer_states": [], "callbacks": {"FederatedLoop": {}}, "epoch": epoch}
    torch.save(content, file)
    os.utime(file, (100 + epoch, 100 + epoch))
    return file


def again(settings) -> FitFolder:
    folder = Path(settings["trainer"]["default_root_dir"])
    return FitFolder(folder, settings, sorted(folder.glob("checkpoints/*.ckpt")))


def test_a_finished_run_is_left_as_it_is(run, settings):
    run()
    found = again(settings())
    assert not found.has_work()
    assert "the finished run with these settings: nothing is done. A larger trainer.max_epochs" in found.said
    shown = {"logger": False, "enable_progress_bar": False, "devices": 2, "strategy": "client_parallel"}
    assert not again(settings(**shown)).has_work()


@pytest.mark.parametrize("folder", ["runs/a", "runs/a/", "./runs/../runs/a"])
def test_a_folder_is_the_same_however_it_is_written(folder):
    writes = {"class_path": "fedlight.AdapterExport", "init_args": {"folder": f"{folder}/adapter"}}
    config = {"trainer": {"default_root_dir": folder, "callbacks": [writes]}}
    found = compared(config, str(Path(folder)))["trainer"]["callbacks"]
    assert found == {"AdapterExport": {"class": "fedlight.AdapterExport", "folder": "./adapter"}}


def test_a_stopped_run_goes_on_from_its_newest_good_checkpoint(run, settings, capsys):
    older, newest = run("stopped", checkpoints=2)
    found = again(settings())
    assert (found.has_work(), found.checkpoint) == (True, newest)
    assert found.said.endswith("run: the run goes on from epoch=1.ckpt")
    newest.write_bytes(newest.read_bytes()[:100])
    found = again(settings())
    assert (found.has_work(), found.checkpoint) == (True, older)
    said = capsys.readouterr().err
    assert said.startswith("passed over: checkpoint '")
    assert "epoch=1.ckpt' is damaged" in said
    older.write_bytes(b"")
    found = again(settings())
    assert (found.has_work(), found.checkpoint) == (True, None)


def test_a_stopped_run_without_a_checkpoint_starts_over(run, settings):
    run("stopped", checkpoints=0)
    found = again(settings())
    assert (found.has_work(), found.checkpoint) == (True, None)
    assert found.said.endswith("run: the run was stopped without a checkpoint, so it starts over")
    assert again(settings(lr=0.2)).has_work()  # as after a refusal whose remedy is another setting


@pytest.mark.parametrize("state", ["done", "stopped"])
def test_other_settings_are_refused_with_each_difference_and_both_remedies(run, settings, state):
    run(state)
    with pytest.raises(ValueError, match="run with other settings") as refusal:
        again(settings(lr=0.2, precision="16-mixed")).has_work()
    how = {"done": "finished", "stopped": "stopped"}[state]
    assert f"has a {how} run with other settings (" in str(refusal.value)
    assert "model.lr: 0.1 -> 0.2" in str(refusal.value)
    assert str(refusal.value).endswith(f"give the same, {REMEDY}")
    with pytest.raises(ValueError, match=r"\(trainer.max_epochs: 3 -> 2\)"):
        again(settings(epochs=2)).has_work()


def test_checkpoints_of_a_federation_are_not_lost_to_a_run_without_one(run, settings):
    files = run("stopped")
    pooled = FitFolder(files[0].parents[1], settings() | {"federated": None}, files)
    with pytest.raises(
        ValueError, match=rf"has a stopped run with other settings \(federated.*\): .* {REMEDY}"
    ):
        pooled.has_work()


def test_with_more_epochs_a_finished_run_goes_on(run, settings):
    (checkpoint,) = run()
    found = again(settings(epochs=5))
    assert (found.has_work(), found.checkpoint) == (True, checkpoint)
    assert found.said.endswith("goes on from epoch=0.ckpt, to 5 epochs instead of 3; schedules follow")
    assert again(settings(epochs=-1)).has_work()


def test_more_epochs_do_not_wake_a_run_that_ended_by_itself(run, settings):
    """As early stopping does: a run of more epochs would have ended there as well."""
    run(epochs=2)
    for epochs in (3, 5, -1):
        found = again(settings(epochs=epochs))
        assert not found.has_work()
        assert "nothing is done. It ended by itself after 2 epochs." in found.said


def test_a_finished_run_without_a_checkpoint_is_not_overwritten(run, settings):
    run(checkpoints=0)
    assert not again(settings()).has_work()
    with pytest.raises(ValueError, match=f"finished run without a checkpoint to go on from: {REMEDY}"):
        again(settings(epochs=5)).has_work()


@pytest.mark.parametrize("state", ["done", "stopped"])
def test_changed_data_are_other_settings(run, settings, data, state):
    run(state)
    data.write_text("2\n")
    with pytest.raises(ValueError, match=f"another content of {data}, which has changed since: .*{REMEDY}"):
        again(settings()).has_work()


def test_a_run_whose_settings_are_not_known_is_refused(run, settings, tmp_path):
    run()
    (tmp_path / "run/fit.json").unlink()
    with pytest.raises(ValueError, match=r"has a run \(checkpoints/epoch=0.ckpt\) and no fit.json"):
        again(settings()).has_work()
    shutil.rmtree(tmp_path / "run/checkpoints")
    with pytest.raises(ValueError, match=r"has a run \(run.json\) and no fit.json"):
        again(settings()).has_work()


def test_a_process_that_looks_while_the_first_one_begins_takes_it_for_a_new_run(settings, tmp_path):
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "run.json").write_text('{"commands": [{"command": "fit", "state": "running"}]}')
    assert FitFolder(begun, settings(), []).has_work(writes=False)
    with pytest.raises(ValueError, match="has a run"):
        FitFolder(begun, settings(), []).has_work()


def test_files_of_others_are_no_run(settings, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/notes.txt").touch()
    with recorded(tmp_path / "run", "validate", ["validate"], 0):
        pass
    found = again(settings())
    assert (found.has_work(), found.checkpoint, found.said) == (True, None, "")


def test_a_damaged_file_of_settings_is_named_with_the_remedy(run, settings, tmp_path):
    run()
    (tmp_path / "run/fit.json").write_text("{")
    with pytest.raises(ValueError, match=f"fit.json is damaged .*: {REMEDY}"):
        again(settings()).has_work()
    again(settings()).begin(starts_over=True, given=None)
    assert not again(settings()).has_work()


def test_earlier_checkpoints_are_not_those_of_a_run_that_started_over(run, settings, tmp_path):
    (old,) = run()
    again(settings(lr=0.2)).begin(starts_over=True, given=None)
    with recorded(tmp_path / "run", "fit", ["fit"], 0):
        raised = again(settings(lr=0.2))  # as another process, or one that comes after a kill
        assert (raised.has_work(), raised.checkpoint) == (True, None)
        torch.save(torch.load(old) | {"epoch": 7}, old)  # the new run writes a file of the same name
        raised = again(settings(lr=0.2))
        assert (raised.has_work(), raised.checkpoint) == (True, old)


def test_a_checkpoint_that_is_given_keeps_the_others_of_the_same_settings(run, settings):
    older, newest = run("stopped", checkpoints=2)
    again(settings()).begin(starts_over=False, given=str(older))
    found = again(settings())
    assert (found.has_work(), found.checkpoint) == (True, newest)
    again(settings(lr=0.2)).begin(starts_over=False, given=str(older))
    found = again(settings(lr=0.2))
    assert (found.has_work(), found.checkpoint) == (True, older)


def test_what_counts_as_a_setting():
    config = {
        "seed_everything": 3,
        "trainer": {
            "max_epochs": 3,
            "default_root_dir": "runs/a",
            "logger": {"class_path": "lightning.pytorch.loggers.CSVLogger"},
            "callbacks": [
                {"class_path": "fedlight.RoundProgress", "init_args": {}},
                {"class_path": "fedlight.AdapterExport", "init_args": {"folder": "runs/a/adapter"}},
                {"class_path": "x.Own", "init_args": {"a": 1}},
                {"class_path": "x.Own", "init_args": {"a": 2}},
            ],
            "devices": 2,
        },
        "data": {"class_path": "fedlight.SFT", "init_args": {"num_workers": 4, "size": 1}},
        "config": ["a.yaml"],
        "resume": True,
    }
    callbacks = {
        "AdapterExport": {"class": "fedlight.AdapterExport", "folder": "./adapter"},
        "Own": {"class": "x.Own", "a": 1},
        "Own 2": {"class": "x.Own", "a": 2},
    }
    assert compared(config, "runs/a") == {
        "seed_everything": 3,
        "trainer": {"max_epochs": 3, "callbacks": callbacks, "devices": 2},
        "data": {"class": "fedlight.SFT", "size": 1},
    }


def test_checkpoints_lie_where_the_callback_writes_them(tmp_path):
    files = [
        write_checkpoint(tmp_path / place, 0)
        for place in ("given", "logs/version_0", "logs/version_1", ".")
        if (tmp_path / place).mkdir(parents=True, exist_ok=True) is None
    ]
    common = {"enable_progress_bar": False, "enable_model_summary": False}

    def found(logger, dirpath=None, root=tmp_path):
        callbacks = [ModelCheckpoint(dirpath)]
        return checkpoints_of(L.Trainer(**common, default_root_dir=root, logger=logger, callbacks=callbacks))

    assert found(False) == [files[3]]
    assert found(False, files[0].parent) == [files[0]]
    assert found(CSVLogger(tmp_path, "logs")) == files[1:3]
    assert found(CSVLogger(tmp_path, "logs"), root=tmp_path / "given") == []  # may be of other runs
    assert checkpoints_of(L.Trainer(**common, logger=False, enable_checkpointing=False)) == []


def left_in(folder: Path):
    visits = [{**row, "seconds": None} for row in table(folder / "visits.csv")]
    return visits, (folder / "adapter/adapter_model.safetensors").read_bytes()


def second_round(callback, trainer, module, batch, batch_idx):
    return trainer.current_epoch == 1 and batch_idx == 1


def first_round(callback, trainer, *args):
    return trainer.current_epoch == 0


@pytest.mark.slow
def test_fit_twice_stopped_and_begun_anew(tiny_model, tmp_path):
    """The command line: killed, stopped and terminated in the second round, finished, given again, changed, longer."""
    whole, run, log = tmp_path / "whole", tmp_path / "run", tmp_path / "log"
    ran("fit", *tiny_selector(tiny_model, whole))
    arguments = ["fit", *tiny_selector(tiny_model, run)]
    for end in (KILLED, STOPPED, TERMINATED):
        prepare = at(FederatedLoop, "on_train_batch_start", second_round, SIGNALS[end])
        assert Child(arguments, log, prepare).wait() == CODES[end]
    outcome = ran(*arguments)
    assert f"{run}: the run goes on from epoch=0.ckpt" in outcome.err
    assert "is not empty" not in outcome.err
    assert left_in(run) == left_in(whole)

    before = {file: file.stat().st_mtime_ns for file in run.rglob("*") if file.name != "run.lock"}
    outcome = fedlight(*arguments, "--trainer.logger=false", "--drop_callbacks=[RoundProgress]")
    assert (outcome.code, outcome.out) == (0, "")
    assert "has the finished run with these settings: nothing is done" in outcome.err
    line = refused(fedlight(*arguments, "--model.lr=0.1", "--federated.local_steps=3"))
    assert "(model.lr: 0.003 -> 0.1; federated.local_steps: 2 -> 3)" in line
    assert line.endswith(REMEDY)
    assert {file: file.stat().st_mtime_ns for file in before} == before

    outcome = fedlight(*arguments, "--trainer.max_epochs=3")
    assert "goes on from epoch=1.ckpt, to 3 epochs instead of 2; schedules follow" in outcome.err
    assert [row["round"] for row in table(run / "visits.csv")] == ["0", "0", "1", "1", "2", "2"]
    assert json.loads((run / "run.json").read_text())["commands"][-1]["epochs"] == 3


@pytest.mark.slow
def test_a_run_that_starts_over_and_is_killed_at_once_does_not_take_up_the_old_one(tiny_model, tmp_path):
    arguments = ["fit", *tiny_selector(tiny_model, tmp_path / "run")]
    ran(*arguments, "--trainer.callbacks+=ClientAccuracy")
    for file in (tmp_path / "run").rglob("*.csv"):
        os.utime(file, (1, 1))
    other = [*arguments, "--model.lr=0.1"]
    prepare = at(FederatedLoop, "on_train_batch_start", first_round, signal.SIGKILL)
    assert Child([*other, "--resume=false"], tmp_path / "log", prepare).wait() == CODES[KILLED]
    assert "no run in it has written an adapter or" in refused(fedlight("export", str(tmp_path / "run")))
    outcome = ran(*other, "--trainer.limit_val_batches=0")
    assert "stopped without a checkpoint, so it starts over" in outcome.err
    assert f"{open_run(tmp_path / 'run', 'last').checkpoint}".endswith("epoch=1-v1.ckpt")
    (anew,) = read_runs([tmp_path / "run"])
    assert (anew.csv("clients.csv"), [row for row in anew.metrics() if row.get("val/loss")]) == ([], [])
    assert "it is of an earlier run" in anew.faults["metrics/version_0/metrics.csv"]
    ran(
        "fit", *tiny_selector(tiny_model, tmp_path / "new", "--model.lr=0.1", "--trainer.limit_val_batches=0")
    )
    assert left_in(tmp_path / "run") == left_in(tmp_path / "new")


def test_a_run_that_the_clock_has_stopped_goes_on_with_the_whole_time(tiny_model, tmp_path, monkeypatch):
    ran("fit", *tiny_selector(tiny_model, tmp_path / "whole"))
    arguments = ["fit", *tiny_selector(tiny_model, tmp_path / "run"), "--trainer.max_time=00:01:00:00"]
    look = Timer._check_time_remaining

    def late_in_the_second_round(timer, trainer):
        timer._offset = 10**6 * (trainer.global_step > 6)  # of 8; the first visit is over
        look(timer, trainer)

    with monkeypatch.context() as clock:
        clock.setattr(Timer, "_check_time_remaining", late_in_the_second_round)
        outcome = ran(*arguments)
    assert "stopped by trainer.max_time: the same command goes on" in outcome.err
    assert ["round 1/2" in outcome.out, "round 2/2" in outcome.out] == [True, False]
    assert json.loads((tmp_path / "run/run.json").read_text())["commands"][-1]["epochs"] == 1
    visits = (tmp_path / "run/visits.csv").read_text().splitlines()[1:]
    assert {line.partition(",")[0] for line in visits} == {"0"}
    outcome = ran(*arguments)
    assert ("goes on from" in outcome.err, "stopped by" in outcome.err) == (True, False)
    assert left_in(tmp_path / "run") == left_in(tmp_path / "whole")
    assert "nothing is done" in ran(*arguments[:-1]).err


@pytest.mark.slow
def test_a_run_by_lightning_itself_starts_as_it_is_told(tiny_model, tmp_path):
    arguments = ["fit", *tiny_selector(tiny_model, tmp_path / "run", "--trainer.max_epochs=1")]
    lightning_cli(arguments)
    with pytest.warns(UserWarning, match="is not empty"):
        cli = lightning_cli(arguments)
    assert cli.trainer.ckpt_path is None
    assert not (tmp_path / "run/fit.json").exists()


def test_the_last_checkpoint_of_a_run_without_one_is_refused(tiny_model, tmp_path):
    """Lightning would warn and train over the run."""
    arguments = ["fit", *tiny_selector(tiny_model, tmp_path / "run", "--trainer.max_epochs=1")]
    ran(*arguments)
    before = (tmp_path / "run/checkpoints/epoch=0.ckpt").stat().st_mtime_ns
    line = refused(fedlight(*arguments, "--ckpt_path=last"))
    assert f"ckpt_path=last: no checkpoint of the run in {tmp_path}/run is called last: leave it out" in line
    assert (tmp_path / "run/checkpoints/epoch=0.ckpt").stat().st_mtime_ns == before
