import inspect
from dataclasses import is_dataclass

import lightning as L
import pytest
from recipe_runs import ran
from tiny_world import fedlight, refused

from fedlight.datamodules.federated.datamodule import FederatedDataModule
from fedlight.federation.algorithm import Aggregation, Algorithm, ServerOptimizer
from fedlight.federation.client import Channel
from fedlight.lightning_cli.class_names import CLASS_FILES, class_of, find_object
from fedlight.lightning_cli.help_page import TRAINER, classes_of, help_page, settings

COMMANDS = ("fit", "validate", "test", "predict")


def in_yaml(value) -> str | None:
    if value is inspect.Parameter.empty:
        return None
    if is_dataclass(value) and value == type(value)():  # nested settings, as they stand in the signature
        return f"{type(value).__name__}()"
    words = {"None": "null", "True": "true", "False": "false"}
    return words.get(str(value), str(value))


@pytest.mark.parametrize(
    "path",
    [
        "callbacks.loop.federated_loop.FederatedLoop",
        "modules.language.module.LanguageModule",
        "datamodules.federated.datamodule.FederatedDataModule",
    ],
)
def test_keys_and_defaults_are_those_of_the_signature(path):
    parameters = [*inspect.signature(find_object(f"fedlight.{path}").__init__).parameters.values()][1:]
    found = settings(path)
    assert {one.name: one.default for one in found} == {one.name: in_yaml(one.default) for one in parameters}
    assert [one.name for one in found if not one.about] == []


@pytest.mark.parametrize("base", [Algorithm, ServerOptimizer, Aggregation, Channel])
def test_classes_that_a_key_takes_are_those_that_derive(base):
    public = [name for name, file in CLASS_FILES.items() if file.startswith("federation.")]
    classes = {name: find_object(name) for name in public}
    derived = {name for name, of in classes.items() if base in getattr(of, "__mro__", ()) and of is not base}
    assert set(classes_of(base.__name__)) == derived
    assert len(derived) > 1


@pytest.mark.parametrize(("part", "base"), [("model", L.LightningModule), ("data", L.LightningDataModule)])
def test_classes_of_model_and_data_are_those_that_derive(part, base):
    page = help_page("fit").split()
    named = {page[i + 1] for i, word in enumerate(page) if word == f"--{part}"}
    classes = {name: class_of(name) for name in CLASS_FILES}
    derived = {name for name, each in classes.items() if each is not None and issubclass(each, base)}
    # No values of a command line: a base class, and two that hold a project's own objects.
    assert named == derived - {FederatedDataModule.__name__, "FederatedWrapper", "GivenLoaders"}


def test_keys_of_the_trainer_and_the_command_are_lightnings():
    assert set(TRAINER) <= set(inspect.signature(L.Trainer.__init__).parameters)
    for command in COMMANDS:
        assert "ckpt_path" in inspect.signature(getattr(L.Trainer, command)).parameters


@pytest.mark.parametrize("columns", [60, 80, 300])
def test_what_is_fedlights_comes_first_and_fits_the_terminal(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    page = help_page("fit")
    keys = ("--federated.algorithm", "--model.lr ", "--data.seed", "--trainer.max")
    places = [page.index(key) for key in keys]
    assert places == sorted(places)
    assert max(map(len, page.splitlines())) <= min(max(columns, 80), 120)
    assert "classes: fedlight methods" in page


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_prints_its_page(command):
    asked = fedlight(command, "--config", "selector.yaml", "-h")
    assert (asked.code, asked.out.rstrip("\n"), asked.err) == (0, help_page(command), "")
    assert asked.out.startswith(f"usage: fedlight {command} --config FILE")


def test_all_keys_are_those_of_the_parser():
    asked = ran("fit", "--help", "all")
    for key in ("--trainer.num_sanity_val_steps", "--federated.help", "--weights_only"):
        assert key in asked.out
    assert "--help all lists all keys" in refused(fedlight("fit", "--config=selector.yaml", "--zzzz=1"))
