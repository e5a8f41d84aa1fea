"""Which weights of a run are taken, and what is said of them: by what the files hold, never by their times or names."""

import json
import os
import shutil

import pytest
import torch
import yaml
from tiny_world import fedlight, refused

from fedlight.export.opened import facts_of, open_run

UNKNOWN = {"class_path": "fedlight.SFTModule", "init_args": {"model": "toy", "nope": 3}}


@pytest.fixture
def own(run, tmp_path):
    """A copy of the run, whose checkpoints lie in the copy."""
    return shutil.copytree(run, tmp_path / "own")


def checkpoint(folder, name, rounds, steps, epoch=None):
    """A checkpoint of the run after so many rounds; the epoch is that of a file from within a round."""
    (first, *_) = sorted(folder.glob("**/*.ckpt"))
    content = torch.load(first, weights_only=True)
    content["callbacks"]["FederatedLoop"]["rounds_done"] = rounds
    content |= {"global_step": steps, "epoch": rounds - 1 if epoch is None else epoch}
    torch.save(content, folder / "checkpoints" / name)
    return folder / "checkpoints" / name


def set_state(folder, state):
    record = json.loads((folder / "run.json").read_text())
    record.pop("digest", None)
    record["commands"][-1] |= {"state": state, "files": {}}  # no digests: the tables may change
    (folder / "run.json").write_text(json.dumps(record))


def test_last_is_the_checkpoint_with_the_most_rounds_however_the_run_was_copied(own):
    newest = checkpoint(own, "epoch=10.ckpt", 11, 44)
    for time, name in enumerate(["epoch=10.ckpt", "epoch=7.ckpt", "epoch=9.ckpt"]):
        file = newest if name == newest.name else checkpoint(own, name, 3 + time, 12)
        os.utime(file, (time, time))
    assert open_run(own, "last").checkpoint == newest


def test_a_checkpoint_from_within_a_round_is_of_the_rounds_before_it(own):
    inside = checkpoint(own, "step=18.ckpt", 4, 16, epoch=4)
    assert open_run(own, str(inside)).rounds() == 4


LOGGED = """epoch,step,win_rate/x,win_rate_low/x,win_rate_high/x,fed/epsilon,fed/delta,exported/epoch
,0,0.5,0.5,0.5,,,
0,3,,,,1.0,1e-5,
,4,0.75,0.625,0.875,,,
1,7,,,,2.0,1e-5,
,8,0.25,0.125,0.375,,,
,8,,,,,,1.0
"""


@pytest.mark.parametrize(
    (
        "rounds",
        "rate",
        "epsilon",
    ),  # None: the best epoch, chosen at the end, so with the privacy of the whole run
    [(None, (0.75, 0.625, 0.875), 2.0), (1, (0.75, 0.625, 0.875), 1.0), (2, (0.25, 0.125, 0.375), 2.0)],
)
def test_scores_of_an_earlier_model_are_those_of_its_round(own, rounds, rate, epsilon):
    (file,) = own.glob("metrics/version_*/metrics.csv")
    file.write_text(LOGGED)
    set_state(own, "done")
    newest = checkpoint(own, "epoch=9.ckpt", rounds, 8) if rounds else None
    facts = facts_of(open_run(own, newest and str(newest)))
    assert facts.scores == [("win_rate/x", *rate)]
    assert (facts.rounds, facts.privacy[0].epsilon) == (rounds or 1, epsilon)


@pytest.mark.parametrize("state", ["running", "stopped", "failed"])
def test_a_continued_run_without_an_end_is_its_newest_checkpoint(own, state):
    newest = checkpoint(own, "epoch=5.ckpt", 6, 24)
    assert open_run(own).adapter == own / "adapter"
    set_state(own, state)
    opened = open_run(own)
    assert (opened.adapter, opened.checkpoint, opened.rounds()) == (None, newest, 6)


def test_a_checkpoint_of_another_run_is_refused(own, run):
    other = sorted(run.glob("**/*.ckpt"))[0]
    config = own / "config.yaml"
    for file in [config] if config.is_file() else own.glob("metrics/version_*/config.yaml"):
        file.write_text(file.read_text().replace(str(run), str(own)))
    with pytest.raises(ValueError, match="settings, scores and rounds would be another run's"):
        open_run(own, str(other))


def test_the_config_is_found_with_any_logger(own):
    (own / "metrics").rename(own / "tensorboard")
    assert open_run(own).kind.__name__ == "SFTModule"
    (file,) = own.glob("tensorboard/version_*/config.yaml")
    file.write_text("model: [")
    with pytest.raises(
        ValueError, match=r"config.yaml is not whole YAML, so nobody can tell what was trained"
    ):
        open_run(own)
    file.unlink()
    for model, message in (
        ([1], "names no model, so nobody can tell"),
        (UNKNOWN, "not of this version of fedlight"),
    ):
        (own / "config.yaml").write_text(yaml.safe_dump({"model": model}))
        with pytest.raises(ValueError, match=message):
            open_run(own).load()
    (own / "config.yaml").unlink()
    with pytest.raises(ValueError, match=r"own: there is no config.yaml, so nobody can tell"):
        open_run(own)


def change_config(folder, before, after):
    (file,) = folder.glob("metrics/version_*/config.yaml")
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))


def test_a_global_model_that_nobody_trained_is_refused_and_models_of_clients_are_on_the_card(own, tmp_path):
    change_config(own, "algorithm: null", "algorithm: {class_path: fedlight.LocalOnly}")
    said = refused(fedlight("export", str(own), f"--output={tmp_path / 'out'}"))
    assert "LocalOnly, which leaves the global model as it was" in said
    change_config(own, "fedlight.LocalOnly", "fedlight.Ditto")
    assert fedlight("export", str(own), f"--output={tmp_path / 'out'}").code == 0
    assert "Ditto trains a model for each client" in (tmp_path / "out/README.md").read_text()
    change_config(own, "fedlight.Ditto", "fedlight.FedSALoRA")
    assert "FedSALoRA, which leaves the global model" in refused(
        fedlight("export", str(own), f"--output={tmp_path / 'b'}")
    )
    change_config(own, "adapter: null", "adapter: one")  # whose B is none of zeros
    assert fedlight("export", str(own), f"--output={tmp_path / 'b'}").code == 0
    assert "factors B are as they were" in (tmp_path / "b/README.md").read_text()


def test_folders_beside_an_export_are_left_alone_and_a_link_is_followed(own, tmp_path):
    for name in ("out.old", "out.tmp", "target"):
        (tmp_path / name).mkdir()
    (tmp_path / "out.old/thesis.txt").write_text("mine")
    (tmp_path / "out").symlink_to(tmp_path / "target")
    assert fedlight("export", str(own), f"--output={tmp_path / 'out'}").code == 0
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "target/adapter_config.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.old", "out.tmp", "own", "target"]
    assert (tmp_path / "out.old/thesis.txt").read_text() == "mine"


def test_the_folder_that_one_is_in_is_refused(own, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    done = fedlight("export", str(own), "--output=.")
    assert "this is the folder you are in" in done.err


def test_a_selector_on_a_merged_base_is_no_judge_of_a_conversation(run, selectors, tmp_path):
    own = shutil.copytree(selectors, tmp_path / "merged")
    change_config(own, "merge_adapter: false", "merge_adapter: true")
    done = fedlight("chat", str(run), "--selector", str(own))
    assert "another adapter merged into it" in done.err


def test_both_forms_of_alpaca_are_on_the_card(own, tmp_path):
    (file,) = own.glob("metrics/version_*/config.yaml")
    config = yaml.safe_load(file.read_text())
    config["data"]["init_args"]["format"]["generation_template"] = "alpaca"
    file.write_text(yaml.safe_dump(config))
    assert fedlight("export", str(own), f"--output={tmp_path / 'out'}").code == 0
    card = (tmp_path / "out/README.md").read_text()
    assert "### Input:" in card
    assert "and this one where `input` is empty" in card
