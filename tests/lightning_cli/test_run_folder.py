import json
import os
import time
from pathlib import Path

import pytest
from holding import end, in_another_process, stay_in
from recipe_runs import ran
from tiny_world import fedlight, refused, tiny_selector

from fedlight.lightning_cli.run_folder import alone_in
from fedlight.runs import contents
from fedlight.runs.contents import local_paths

DAMAGE = {
    "cut": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "zeros": lambda data: bytes(len(data)),
    "list": lambda data: b"[1, 2]",
    "text": lambda data: b"no JSON",
    "bytes": lambda data: b"\xff" + data,
    "other number": lambda data: data.replace(b"17", b"16"),
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a recipe of function calls in ``out``; ``done`` are the calls, in order."""
    done = []

    def note(name, **arguments):
        done.append(name)
        if "output" in arguments:
            Path(arguments["output"]).write_text("17\n")
        if name == "fails":
            raise ValueError("it fails")
        return {"rows": [{"method": name, "value": 17}]}

    monkeypatch.setattr("fedlight.recipes.steps.note", note, raising=False)
    monkeypatch.chdir(tmp_path)

    def run(**stages):
        told = {name: {"name": name, **given} for name, given in stages.items()}
        specs = {name: {"call": "fedlight.recipes.steps.note", "with": own} for name, own in told.items()}
        (tmp_path / "small.yaml").write_text(json.dumps({"seeds": [0], "stages": specs}))
        done.clear()
        return fedlight("run", "small.yaml", "--output=out")

    run.done = done
    return run


def test_a_second_process_says_who_is_there_and_does_nothing(run, tmp_path):
    folder = tmp_path / "out/seed0"
    with in_another_process(stay_in(alone_in(folder, "--output"))) as pid:
        line = refused(run(one={}))
        assert f"{folder} is in use by process {pid} on {os.uname().nodename} since 20" in line
        assert "wait for its end or end it, or give another --output" in line
        assert run.done == []
        end(pid)
        half = folder / "one/x.csv.01234567.tmp"
        half.parent.mkdir()
        half.touch()
        assert run(one={}).code == 0
    assert run.done == ["one"]
    assert sorted(file.name for file in folder.rglob("*") if file.is_file()) == ["done.json", "settings.json"]


def test_the_seeds_of_a_recipe_can_be_shared_out(run, tmp_path):
    with in_another_process(stay_in(alone_in(tmp_path / "out/seed1", "--output"))):
        assert run(one={}).code == 0
        line = refused(fedlight("run", "small.yaml", "--output=out", "--seeds", "0", "1"))
        assert f"{tmp_path}/out/seed1 is in use" in line


def test_a_fit_is_alone_in_its_folder(tiny_model, tmp_path):
    folder = tmp_path / "run"
    with in_another_process(stay_in(alone_in(folder, ""))) as pid:
        line = refused(fedlight("fit", *tiny_selector(tiny_model, folder)))
        assert f"is in use by process {pid} on " in line
        assert line.endswith("give another --trainer.default_root_dir")
        assert [file.name for file in folder.iterdir()] == ["run.lock"]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["done.json", "settings.json"])
def test_a_damaged_mark_is_named_and_nothing_is_done(run, tmp_path, name, damage):
    assert run(one={"value": 17}, two={}).code == 0
    file = tmp_path / "out/seed0/one" / name
    whole = file.read_bytes()
    file.write_bytes(DAMAGE[damage](whole))
    line = refused(run(one={"value": 17}, two={}))
    assert f"{file} is damaged" in line
    assert f"delete the folder {file.parent} and those of the stages after it" in line
    assert run.done == []
    file.write_bytes(whole)
    assert run(one={"value": 17}, two={}).code == 0
    assert run.done == []


def test_without_its_settings_a_stage_is_not_taken_for_done(run, tmp_path):
    assert run(one={}).code == 0
    (tmp_path / "out/seed0/one/settings.json").unlink()
    line = refused(run(one={}))
    assert "out/seed0/one has no settings.json, so nobody can tell with which settings" in line
    assert run.done == []


def test_results_of_the_recipe_are_made_from_those_of_the_stages(run, tmp_path):
    assert run(one={}).code == 0
    results = tmp_path / "out/results.json"
    whole = results.read_text()
    for damaged in (whole[:10], "", whole.replace("17", "16")):
        results.write_text(damaged)
        assert run(one={}).code == 0
        assert results.read_text() == whole


def test_marks_of_an_earlier_version_count(run, tmp_path):
    assert run(one={}).code == 0
    for name in ("done.json", "settings.json"):
        file = tmp_path / "out/seed0/one" / name
        of_old = {"digest", "files", "contents of files"}
        content = {key: value for key, value in json.loads(file.read_text()).items() if key not in of_old}
        file.write_text(json.dumps(content))
    assert run(one={}).code == 0
    assert run.done == []


def made_long_ago(*files):
    """As data mostly are: files that were changed a moment ago are read again, whatever their times say."""
    for file in files:
        os.utime(file, (1, 1))


@pytest.mark.parametrize("stage", ["one", "fails"])
def test_changed_data_under_the_same_name_are_refused(run, tmp_path, stage):
    data = tmp_path / "data.jsonl"
    data.write_text("1\n")
    made_long_ago(data)
    given = {stage: {"source": "data.jsonl"}}
    assert run(**given).code == (2 if stage == "fails" else 0)
    (tmp_path / f"out/seed0/{stage}/rows.jsonl.partial").touch()  # what a stage leaves that has begun
    data.write_text("2\n")
    line = refused(run(**given))
    assert f"out/seed0/{stage} was made with another content of data.jsonl, which has changed since" in line
    assert run.done == []
    data.write_text("1\n")  # the same content at another time
    assert run(**given).code == (2 if stage == "fails" else 0)


def test_data_that_are_gone_or_only_touched_do_not_undo_what_is_done(run, tmp_path, monkeypatch):
    data = tmp_path / "data.jsonl"
    data.write_text("1\n")
    made_long_ago(data)
    given = {"one": {"source": "data.jsonl"}}
    assert run(**given).code == 0
    with monkeypatch.context() as patched:  # same size and time: not read again
        patched.setattr(contents, "digest_of", lambda path: pytest.fail(f"{path} was read"))
        assert run(**given).code == 0
    data.touch()
    assert run(**given).code == 0
    data.unlink()
    assert run(**given).code == 0
    assert run.done == []


def test_a_change_within_the_timers_step_is_seen(run, tmp_path):
    """Same size, same time: that a file was written a moment before it was read says that its time cannot be relied on."""
    data = tmp_path / "data.jsonl"
    data.write_text("1\n")
    now = time.time_ns()
    os.utime(data, ns=(now, now))
    assert run(one={"source": "data.jsonl"}).code == 0
    contents._file_digest.cache_clear()  # another process
    data.write_text("2\n")
    os.utime(data, ns=(now, now))
    assert "another content of data.jsonl" in refused(run(one={"source": "data.jsonl"}))


def test_a_changed_file_in_a_folder_is_refused(run, tmp_path):
    adapter = tmp_path / "models/adapter"
    (adapter / ".cache").mkdir(parents=True)
    (adapter / "weights").write_bytes(b"\0" * 100)
    assert run(one={"adapter": "models/adapter"}).code == 0
    (adapter / ".cache/x").touch()
    assert run(one={"adapter": "models/adapter"}).code == 0
    (adapter / "weights").write_bytes(b"\0" * 99 + b"\1")
    assert "another content of models/adapter" in refused(run(one={"adapter": "models/adapter"}))


@pytest.mark.parametrize("damage", ["other number", "gone"])
def test_a_later_stage_does_not_read_a_changed_result(run, tmp_path, damage):
    file = tmp_path / "out/seed0/one/rows.jsonl"
    one, two = {"output": "${run}/one/rows.jsonl"}, {"source": "${run}/one/rows.jsonl"}
    assert run(one=one).code == 0
    if damage == "gone":
        file.unlink()
    else:
        file.write_text("16\n")
    line = refused(run(one=one, two=two))
    what = "is gone" if damage == "gone" else "is not what the stage wrote there"
    assert f"{file} {what}: delete the folder {file.parent} and those of the stages after it" in line
    assert run.done == []
    file.write_text("17\n")
    assert run(one=one, two=two).code == 0
    assert run.done == ["two"]


def test_what_counts_as_read_from_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("test", "votes", "owner/name"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "a.csv").touch()
    settings = {
        "data.init_args.source": "votes",
        "split": "test",  # a word
        "data.init_args.split.test_source": "owner/name",
        "data.init_args.other": ["a.csv", {"x": f"{tmp_path}/a.csv"}],
        "callbacks": [{"init_args": {"path": "a.csv"}}, {"init_args": {"folder": "votes"}}],
        "output": "a.csv",
        "hub": "owner/other",
        "toy": "toy:votes?size=3",
        "text": "a\nb",
    }
    assert sorted(local_paths(settings)) == sorted(["votes", "owner/name", "a.csv", f"{tmp_path}/a.csv"])


def test_a_damaged_run_record_is_kept_aside(tiny_model, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text('{"commands": [')
    outcome = ran("validate", *tiny_selector(tiny_model, run))
    assert f"{run / 'run.json'} is damaged: it is kept as run.damaged.json" in outcome.err
    assert (run / "run.damaged.json").read_text() == '{"commands": ['
    (entry,) = json.loads((run / "run.json").read_text())["commands"]
    assert entry["command"] == "validate"


@pytest.mark.parametrize(("number", "words"), [(30, "Read-only file system"), (13, "Permission denied")])
def test_a_folder_that_cannot_be_written_is_named_before_any_work(run, tmp_path, monkeypatch, number, words):
    def fails(*args, **kwargs):
        raise OSError(number, words)

    monkeypatch.setattr("tempfile.TemporaryFile", fails)
    line = refused(run(one={}))
    assert f"--output={tmp_path}/out/seed0 cannot be written ({words}): choose another folder" in line
    assert run.done == []


def test_settings_that_were_refused_do_not_stand_in_the_way_of_others(run, tmp_path):
    """Who has mistyped a value gives the right one and goes on in the same folder."""
    assert "it fails" in refused(run(one={}, fails={"value": 16}))
    assert "it fails" in refused(run(one={}, fails={"value": 17}))
    assert run.done == ["fails"]
    settings = json.loads((tmp_path / "out/seed0/fails/settings.json").read_text())
    assert settings["value"] == 17
    (tmp_path / "out/seed0/fails/rows.jsonl.partial").touch()  # now there is work
    line = refused(run(one={}, fails={"value": 16}))
    assert "was made with other settings (value: 17 -> 16): give another --output" in line
    assert run.done == []
