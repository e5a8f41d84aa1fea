import importlib.util
import io
import re
import shlex
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from tiny_world import fedlight, refused

from fedlight.cli.app_folder import app_name, with_root
from fedlight.conf import path as conf_path
from fedlight.flower.settings import OF_APP, config_arguments, node_settings
from fedlight.recipes.stages import settings_in

needs_flwr = pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="needs fedlight[flower]")


def init(folder, *settings, config="selector.yaml"):
    return fedlight("flower", "init", "--config", config, str(folder), *settings)


@pytest.fixture(scope="module")
def app(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("apps") / "my_app"
    outcome = init(folder, "--federated.local_steps=3")
    assert outcome.code == 0, outcome.err
    assert "need the clients' rows or models, which no server has: ClientData" in outcome.out
    assert "run at the server alone: RoundProgress, VisitLog, AdapterExport, ModelCheckpoint" in outcome.out
    return folder


def settings(app: Path) -> dict:
    return tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]


def test_the_config_is_that_of_the_emulator_but_for_where_it_writes(app):
    """What selector.yaml extends stands in it."""
    own, emulated = settings_in(str(app / "selector.yaml")), settings_in("selector.yaml")
    assert own["trainer"].pop("default_root_dir") == f"{app}/runs"
    assert emulated["trainer"].pop("default_root_dir") == "runs/selector"
    assert own == emulated
    assert "extends" not in (app / "selector.yaml").read_text()


def test_a_config_that_extends_nothing_keeps_its_comments(tmp_path):
    outcome = init(tmp_path / "app", config="reward.yaml")
    assert outcome.code == 0, outcome.err
    own, emulated = ((folder / "reward.yaml").read_text() for folder in (tmp_path / "app", conf_path("")))
    changed = [(a, b) for a, b in zip(own.splitlines(), emulated.splitlines(), strict=True) if a != b]
    assert changed == [(f'  default_root_dir: "{tmp_path}/app/runs"', "  default_root_dir: runs/reward")]


def test_the_settings_of_the_app_are_all_that_there_are(app):
    assert settings(app).keys() == OF_APP.keys()
    assert shlex.split(settings(app)["set"]) == ["--federated.local_steps=3"]


def test_the_config_is_found_where_flower_has_installed_the_app(app, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(app), *sys.path])
    expected = ["--config", str(app / "selector.yaml"), "--federated.local_steps=3"]
    assert config_arguments(settings(app)) == expected


def test_a_node_without_a_folder_keeps_its_memories_where_they_are_found_again(monkeypatch, tmp_path):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    assert node_settings({}, 7)[1] == tmp_path / "fedlight" / "node-7"
    assert node_settings({"partition-id": 1, "num-partitions": 2}, 7)[1] == tmp_path / "fedlight" / "node-1"
    assert node_settings({"folder": "/var/lib/a"}, 7)[1] == Path("/var/lib/a")


def test_the_readme_names_the_apps_own_folder_and_settings(app):
    text = (app / "README.md").read_text()
    assert f'folder="{app}/nodes/a"' in text
    assert "when 8 clients are there" in text
    assert not re.search(r"\$(name|config|folder|notes)\b", text)


def test_the_readme_of_buffered_rounds_names_the_clients_that_the_server_waits_for(tmp_path):
    buffered = "--federated.fleet=Fleet", "--federated.fleet.buffered=FedBuff"
    more = "--federated.fleet.buffered.buffer_size=9", "--federated.fleet.buffered.concurrency=3"
    for further, clients in ((more, 9), (more[1:], 10), (more[:1], 9)):
        folder = tmp_path / f"app{len(further)}-{clients}"
        outcome = init(folder, *buffered, *further)
        assert outcome.code == 0, outcome.err
        assert f"when {clients} clients are there" in (folder / "README.md").read_text()


@needs_flwr
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Click, by typer's import
def test_flower_builds_the_app_without_runs_and_keys(app):
    from flwr.cli.build import build_fab_from_disk
    from flwr.cli.config_utils import load_and_validate

    (app / "runs").mkdir(exist_ok=True)
    (app / "runs/run.json").write_text("{}")
    assert load_and_validate(app / "pyproject.toml")[1] == []
    names = zipfile.ZipFile(io.BytesIO(build_fab_from_disk(app))).namelist()
    assert set(names) == {"pyproject.toml", "README.md", "selector.yaml", ".info/CONTENT"}


NOISE = " ".join(f"federated.channel.up{own}" for own in ("=ClipAndNoise", ".clip_norm=1.0", ".epsilon=4.0"))
DPSGD = "federated.parts.clip_norm=1.0 federated.parts.epsilon=4.0"
BISCUIT = "federated.algorithm=FedBiscuit federated.algorithm"
FORWARD, ACCURACY = "federated.forward=ZerothOrder", "trainer.callbacks+=ClientAccuracy"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("federated.fleet=devices/fleets/phones.yaml", "federated.fleet=Fleet does not work under Flower"),
        (f"federated.channel=Wire {NOISE}", "channel.up=ClipAndNoise does not work under Flower: a node"),
        (f"federated.parts+=DPSGD {DPSGD}", "federated.parts=DPSGD does not work under Flower: a node"),
        (f"federated.algorithm=FedKSeed {FORWARD}", "algorithm=FedKSeed does not work under Flower"),
        (f"{BISCUIT}.assignment=KnownGroups model.num_adapters=3", "KnownGroups does not work under Flower"),
        ("trainer.precision=16-mixed", "trainer.precision=16-mixed has a loss scale"),
        ("federated=null", "the config has no key federated:, so there is nothing to deploy"),
        ("data=data/toy_votes.yaml", "names a further config"),
        (f"{FORWARD} federated.forward.only_where_needed=true", "asks emulated devices: leave it out"),
        ("trainer.callbacks+=EarlyStopping trainer.callbacks.monitor=val/loss", "monitors val/loss"),
        (f"{ACCURACY} trainer.limit_val_batches=2", "leave trainer.limit_val_batches out"),
    ],
)
def test_what_cannot_be_deployed_is_refused_before_anything_is_written(settings, message, tmp_path):
    folder = tmp_path / "app"
    assert message in refused(init(folder, *(f"--{each}" for each in settings.split())))
    assert not folder.exists()


def test_keys_of_the_config_may_stand_in_front_of_the_folder(tmp_path):
    keys = ["--federated.local_steps", "3", "--federated.clients_per_round=2"]
    fedlight("flower", "init", *keys, "--config", "selector.yaml", str(tmp_path / "app"))
    assert settings(tmp_path / "app")["set"] == " ".join(keys)


def test_a_folder_in_use_stays_as_it_is(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert "is there and not empty" in refused(init(tmp_path))
    assert [one.name for one in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("name", ["1st", "a" * 33, "..."])
def test_a_folder_that_makes_no_name_is_refused(name):
    with pytest.raises(ValueError, match="makes no name of a Flower app"):
        app_name(name)


@pytest.mark.parametrize(
    "text",
    [
        *(file.read_text() for file in sorted(conf_path("").glob("*.yaml"))),
        "model: a  # kept\n",
        "trainer:\n  max_epochs: 3\nmodel: a\n",
        "trainer: {max_epochs: 3}\nmodel: a\n",
        "model: a\ntrainer:\n  default_root_dir: 'runs/a'  # kept\n  max_epochs: 3\n",
        "trainer:\n  default_root_dir: ${x}/a\n",
    ],
)
def test_a_config_gets_another_folder_and_keeps_all_else(text):
    before, after = yaml.safe_load(text), yaml.safe_load(with_root(text, Path("/srv/a b")))
    assert after["trainer"].pop("default_root_dir") == "/srv/a b"
    before.setdefault("trainer", {}).pop("default_root_dir", None)
    assert after == before
    assert ("# kept" in text) == ("# kept" in with_root(text, Path("/srv")))
