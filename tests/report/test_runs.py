import json
import os

import pytest
from stage_folders import logged, stage_folder
from tiny_world import write_lines

from fedlight.report.sections.overview import runs_table
from fedlight.runs.facts import rounds
from fedlight.runs.rows import merged
from fedlight.runs.run import read_runs


@pytest.fixture
def recipe(tmp_path):
    """Two seeds with a training and a test each, and a stage over both."""
    for seed in (0, 1):
        for place, (name, command) in enumerate([("fit_it", "fit"), ("a_test", "test")]):
            folder = stage_folder(tmp_path / f"demo/seed{seed}/{name}", f"{command} selector.yaml")
            (folder / "adapter").mkdir()
            os.utime(folder / "settings.json", (place, place))
    stage_folder(tmp_path / "demo/seeds_0_1/plot", "call fedlight.report.figures.plots.clients")
    return tmp_path / "demo"


def test_a_recipe_is_its_seeds_and_stages_in_their_order(recipe):
    runs = read_runs([recipe])
    labels = ["fit_it, seed 0", "a_test, seed 0", "fit_it, seed 1", "a_test, seed 1", "plot"]
    assert [run.label for run in runs] == labels
    assert [run.method for run in runs] == ["fit_it", "a_test", "fit_it", "a_test", "plot"]
    assert [run.seed for run in runs] == [0, 0, 1, 1, None]
    assert [run.command for run in runs] == ["fit", "test", "fit", "test", "call"]


def test_runs_are_told_apart_and_there_once(recipe, tmp_path):
    write_lines(tmp_path / "again/seed0/fit_it/visits.csv", "round", "0")
    labels = [run.label for run in read_runs([recipe, tmp_path / "again"])]
    assert labels[0] == "demo/fit_it, seed 0"
    assert labels[-1] == "again/fit_it"
    assert len(set(labels)) == len(labels)
    assert len(read_runs([recipe, recipe / "seed0" / "fit_it"])) == 5
    folders = [tmp_path / parent / "run" for parent in ("x", "y")]
    for folder in folders:
        write_lines(folder / "visits.csv", "round", "0")
    assert [run.label for run in read_runs(folders)] == ["x/run", "y/run"]


def test_what_is_no_run_is_named(tmp_path):
    stage_folder(tmp_path / "augmentations/direct", {"augmentation": "Direct"})
    with pytest.raises(ValueError, match=r"there is no run in it.*default_root_dir"):
        read_runs([tmp_path])
    with pytest.raises(ValueError, match="nowhere: there is no such folder"):
        read_runs([tmp_path / "nowhere"])


def test_half_rows_are_left_out_and_counted(tmp_path):
    # Bytes that are no text are no error.
    (tmp_path / "visits.csv").write_bytes(b"round,client,loss\n0,c1,0.5\n0,\xff\xfe\x00c2,0.6\n1,c")
    (tmp_path / "completions.jsonl").write_text('{"a": 1}\n{"a": 2}\n{"a"\n')
    (tmp_path / "done.json").write_text('{"result": {"met')
    (tmp_path / "config.yaml").write_text("trainer: {max_epochs: [")
    (run,) = read_runs([tmp_path])
    assert [row["client"] for row in run.csv("visits.csv")] == ["c1", "\ufffd\ufffdc2"]
    assert run.jsonl("completions.jsonl") == [{"a": 1}, {"a": 2}]
    assert run.done() == {}
    assert run.config() == {}
    assert run.faults == {
        "visits.csv": "1 of 3 rows are not whole",
        "completions.jsonl": "1 of 3 lines are not whole",
        "done.json": "is not whole JSON",
        "config.yaml": "is not whole YAML",
    }


def test_a_resumed_run_goes_on_where_it_was_resumed(tmp_path):
    logged(tmp_path, "loss,score", "0,0,5,", "1,1,4,", "1,1,,0.1", "2,2,9,")  # killed in epoch 2
    logged(tmp_path, "loss,score", "2,2,3,", "3,3,2,0.2", version=1)
    logged(tmp_path, "test/accuracy", "0,0,0.75", version=2)  # a test by hand, which replaces nothing
    (run,) = read_runs([tmp_path])
    losses = [(row["epoch"], row["loss"]) for row in run.metrics() if row.get("loss")]
    assert losses == [("0", "5"), ("1", "4"), ("2", "3"), ("3", "2")]
    assert [row["score"] for row in run.metrics() if row.get("score")] == ["0.1", "0.2"]
    assert [row["test/accuracy"] for row in run.metrics() if row.get("test/accuracy")] == ["0.75"]


def test_the_record_is_that_of_the_training_and_its_time_that_of_the_last_command(tmp_path):
    fit, test = {"command": "fit", "state": "done", "seed": 3}, {"command": "test", "state": "done"}
    (tmp_path / "run.json").write_text(json.dumps({"commands": [fit, test]}))
    (run,) = read_runs([tmp_path])
    assert run.command == "fit"
    assert run.is_done
    fits = [{"command": "fit", "seconds": seconds} for seconds in (50, 9)]
    captions = []
    for commands in (fits[:1], fits):
        (tmp_path / "run.json").write_text(json.dumps({"commands": commands}))
        table = runs_table(read_runs([tmp_path]))
        captions.append(table.caption)
    assert "that of the last one" not in captions[0]
    assert captions[1].endswith("Of a run that several commands trained, the time is that of the last one.")
    assert table.lines[0][7].startswith("9")


@pytest.mark.parametrize("is_done", [True, False])
def test_rounds_of_a_run_that_has_logged_nothing(tmp_path, is_done):
    (tmp_path / "config.yaml").write_text("trainer: {max_epochs: 4}\n")
    (tmp_path / "settings.json").write_text(json.dumps({"stage": "fit sft.yaml"}))
    if is_done:
        (tmp_path / "done.json").write_text("{}")
    (run,) = read_runs([tmp_path])
    assert rounds(run) == ((4 if is_done else 0), 4)


FIT = [{"epoch": str(epoch), "step": str(9 * epoch + 8), "val/loss": f"0.{9 - epoch}"} for epoch in range(3)]


@pytest.mark.parametrize(("last", "over"), [("1,5,0.5,", 1), ("1,5,,0.25", 2)])
def test_an_epoch_of_which_only_steps_are_logged_is_not_done(tmp_path, last, over):
    folder = stage_folder(tmp_path / "sft", "fit sft.yaml", run_json='{"commands": [{"command": "fit"}]}')
    logged(
        folder, "train/loss,val/loss", *(f"0,{step},{step}," for step in range(3)), "0,2,,0.5", "1,4,1,", last
    )
    (run,) = read_runs([folder])
    assert rounds(run) == (over, None)


def test_a_round_that_was_cut_is_not_done_though_it_was_validated(tmp_path):
    logged(stage_folder(tmp_path / "bis"), "fed/clients,val/loss", "0,3,,0.5", "0,3,4,", "1,3,,0.5")
    (run,) = read_runs([tmp_path / "bis"])
    assert rounds(run) == (1, None)


def test_a_validation_of_the_finished_run_leaves_its_curve_and_one_begun_anew_replaces_it() -> None:
    validation = [{"epoch": "0", "step": "0", "val/loss": "0.7", "val/new": "1"}]
    assert merged([FIT, validation]) == [*FIT, {"epoch": "0", "step": "0", "val/loss": "", "val/new": "1"}]
    assert merged([FIT, [{"epoch": "0", "step": "0", "val/loss": "0.7"}]]) == FIT
    assert merged([validation]) == validation
    again = [{"epoch": "0", "step": "8", "val/loss": "0.5"}]
    assert merged([FIT, again]) == again
