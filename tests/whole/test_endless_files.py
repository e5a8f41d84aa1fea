import gzip
import json
import os

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from in_time import in_time

from fedlight.callbacks.logs.group_log import read_selectors
from fedlight.callbacks.loop.round_table import RoundTable
from fedlight.datamodules.instructions.augmentation_record import AugmentationRecord
from fedlight.datamodules.rows import rows
from fedlight.datamodules.rows.rows import RowsError, load_rows
from fedlight.devices.device import load_device
from fedlight.generators.chat_server import Answer
from fedlight.generators.endpoint import AnswerCache
from fedlight.lightning_cli import config_files
from fedlight.lightning_cli.cli import lightning_cli
from fedlight.lightning_cli.config_files import check_config, layers
from fedlight.lightning_cli.run_folder import alone_in
from fedlight.recipes.recipe import load
from fedlight.runs.folders import runs_below
from fedlight.runs.run import read_runs
from fedlight.support.checks import MOST_REPEATED, check_yaml
from fedlight.support.files import BoundError, check_regular, read_json


def bomb(levels=9):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels + 1)]
    return "\n".join(lines) + "\n"


@pytest.fixture
def pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    return tmp_path / "pipe.yaml"


def test_links_to_files_are_read_and_what_may_never_end_is_not(tmp_path, pipe):
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "link.json").symlink_to("a.json")
    assert read_json(tmp_path / "link.json", "") == {}
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    with in_time(), pytest.raises(BoundError, match=r"zero\.json is a device, which may never end: give"):
        read_json(tmp_path / "zero.json", "")
    with in_time(), pytest.raises(BoundError, match=r"pipe\.yaml is a pipe"):
        read_json(pipe, "")
    with open(tmp_path / "large", "wb") as file:
        file.truncate(10 * 2**30)
    with pytest.raises(BoundError, match="large has 10,240 MiB, and at most 512 MiB are read: give a small"):
        read_json(tmp_path / "large", "")
    assert check_regular(tmp_path / "large") == tmp_path / "large"  # streamed, it may be as large as it is
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none.json", "")


def test_aliases_count_for_all_that_they_stand_for():
    check_yaml("a: &a {x: 1, y: [1, 2]}\nb: *a\nc: [*a, *a]\n", "x.yaml")
    values = MOST_REPEATED // 5  # each alias stands for a list and its four values
    check_yaml(f"a: &a [1, 2, 3, 4]\nb: [{', '.join(['*a'] * values)}]", "x.yaml")
    with pytest.raises(BoundError, match=r"x\.yaml: aliases \(\*name\) stand for more than 10,000 values"):
        check_yaml(f"a: &a [1, 2, 3, 4]\nb: [{', '.join(['*a'] * (values + 1))}]", "x.yaml")
    with in_time(), pytest.raises(BoundError, match="aliases"):
        check_yaml(bomb(), "x.yaml")


DEEP = "[" * 50_000 + "]" * 50_000


@pytest.mark.parametrize("text", [bomb(), f"a: {DEEP}", "extends: pipe.yaml\n", "x" * 2**21])
def test_configs_recipes_and_devices(tmp_path, monkeypatch, pipe, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(text)
    match = r"more than 100 deep|aliases|is a pipe|has 2 MiB, and at most 1 MiB are read"
    for read in (layers,) if "extends" in text else (layers, load, load_device):
        with in_time(), pytest.raises(BoundError, match=match):
            read("a.yaml")


def test_a_config_inside_of_a_config(tmp_path, capsys):
    (tmp_path / "data.yaml").write_text(bomb())
    with in_time(60), pytest.raises(SystemExit):
        lightning_cli(["fit", "--config=selector.yaml", f"--data={tmp_path / 'data.yaml'}"])
    (line, _) = capsys.readouterr().err.splitlines()
    assert line.startswith("fedlight: data: ")
    assert "aliases (*name) stand for more than 10,000 values" in line


def test_a_chain_of_configs_has_an_end_and_each_is_read_once(tmp_path, monkeypatch):
    (tmp_path / "c0.yaml").write_text("seed_everything: 1\n")
    for number in range(1, 600):
        (tmp_path / f"c{number}.yaml").write_text(f"extends: c{number - 1}.yaml\n")
    most = config_files.MOST_LAYERS
    assert len(layers(str(tmp_path / f"c{most - 1}.yaml"))) == most
    with in_time(), pytest.raises(ValueError, match=r"over 30 configs extend each other; join some"):
        layers(str(tmp_path / "c599.yaml"))
    (tmp_path / "c0.yaml").write_text("seed_everything: 1\n")
    for number in range(1, 20):  # 2 ** 19 ways lead to the last one
        (tmp_path / f"c{number}.yaml").write_text(f"extends: [c{number - 1}.yaml, c{number - 1}.yaml]\n")
    asked = []
    monkeypatch.setattr(config_files, "check_config", lambda c: asked.append(c) or check_config(c))
    assert len(layers(str(tmp_path / "c19.yaml"))) == len(asked) == 20
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    with pytest.raises(ValueError, match="extends itself, or is below more than 10 others"):
        load(str(tmp_path / "a.yaml"))


def test_rows(tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    os.mkfifo(folder / "a.jsonl")
    for source in (folder, folder / "a.jsonl"):
        with in_time(), pytest.raises(BoundError, match=r"a\.jsonl is a pipe"):
            load_rows(str(source))
    (tmp_path / "zero.csv").symlink_to("/dev/zero")
    with in_time(), pytest.raises(BoundError, match=r"zero\.csv is a device"):
        load_rows(str(tmp_path / "zero.csv"))
    for text in (f'{{"a": {DEEP}}}', DEEP):
        (tmp_path / "deep.json").write_text(text)
        with pytest.raises(RowsError, match=r"deep\.json.*: lists and objects are nested too deep\."):
            load_rows(str(tmp_path / "deep.json"))


def test_packed_rows_that_stand_for_far_more(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "SMALL_BYTES", 2**16)
    file = tmp_path / "a.csv.gz"
    file.write_bytes(gzip.compress(b"a\n" + b"1" * 2**22))
    assert 2**22 / file.stat().st_size > rows.MOST_TIMES
    with pytest.raises(BoundError, match=r"unpacks to more than \d MiB, 100 times its size, as no rows do"):
        load_rows(str(file))
    numbers = np.random.default_rng(0).integers(10**9, size=20_000)
    file.write_bytes(gzip.compress(("a\n" + "\n".join(map(str, numbers))).encode()))
    assert [int(row["a"]) for row in load_rows(str(file))] == numbers.tolist()
    monkeypatch.setattr(rows, "MOST_ROWS", 999)
    pyarrow.parquet.write_table(pyarrow.table({"a": [1] * 1000}), tmp_path / "a.parquet")
    with pytest.raises(BoundError, match=r"a\.parquet has 1,000 rows, and at most 999 are read: give a"):
        load_rows(str(tmp_path / "a.parquet"))


@pytest.mark.parametrize(
    "name", ["visits.csv", "settings.json", "metrics/version_0/metrics.csv", "config.yaml"]
)
def test_a_report_leaves_such_a_file_out_and_says_so(tmp_path, name):
    run = tmp_path / "run"
    (run / name).parent.mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"commands": []}))
    os.mkfifo(run / name)
    with in_time():
        (found,) = read_runs([run])
        read = {"csv": found.csv, "json": found.json}.get(name.rpartition(".")[2])
        assert not (read(name) if read else found.jsonl(name))
    left_out = f"is left out: {name} is a pipe, which may never end: give a plain file, or remove it"
    assert found.faults == {name: left_out}


@pytest.mark.parametrize("text", [bomb(), f"a: {DEEP}"])
def test_a_report_leaves_such_a_config_out(tmp_path, text):
    (tmp_path / "run.json").write_text(json.dumps({"commands": []}))
    (tmp_path / "config.yaml").write_text(text)
    with in_time():
        (found,) = read_runs([tmp_path])
        assert found.config() == {}
    assert found.faults["config.yaml"].startswith("is left out: config.yaml: ")


def test_links_in_a_circle_are_not_followed(tmp_path):
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "one" / "run.json").write_text("{}")
    for number in range(40):
        (tmp_path / "runs" / f"link{number}").symlink_to(tmp_path / "runs")
    (tmp_path / "runs" / "latest").symlink_to("one")
    with in_time():
        found = runs_below(tmp_path / "runs")
    assert [run.name for run in found] == ["latest", "one"]


def test_a_command_refuses_a_run_folder_with_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "visits.csv")
    with in_time(), pytest.raises(BoundError, match=r"visits\.csv is a pipe"), alone_in(tmp_path, "--output"):
        pass
    (tmp_path / "visits.csv").unlink()
    (tmp_path / "gone").symlink_to("nowhere")
    with alone_in(tmp_path, "--output"):
        pass
    assert sorted(os.listdir(tmp_path)) == ["gone"]


def test_readers_of_single_files(tmp_path, pipe):
    with in_time():
        with pytest.raises(BoundError, match="is a pipe"):
            RoundTable(pipe).rows()
        with pytest.raises(ValueError, match="is not a file that GroupLog has written"):
            read_selectors(pipe)
        os.mkfifo(tmp_path / "settings.json")
        with pytest.raises(ValueError, match=r"settings\.json is damaged"):
            AugmentationRecord(tmp_path).refuse_damaged()
        cache = AnswerCache(str(tmp_path / "answers"))
        cache.write("ab" * 16, Answer("yes", 1, 1))
        (file,) = (tmp_path / "answers").rglob("*.json")
        file.unlink()
        os.mkfifo(file)
        assert cache.read(["ab" * 16]) == {}
        cache.write("ab" * 16, Answer("yes", 1, 1))  # it takes the place of the pipe
        assert cache.read(["ab" * 16])["ab" * 16].text == "yes"
