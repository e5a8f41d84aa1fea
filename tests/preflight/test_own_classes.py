import json
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import lightning as L
import pytest
from tiny_world import VOTES, fedlight

from fedlight.datamodules.instructions.augmentation import Augmentation
from fedlight.evaluation.judge import Judge
from fedlight.support.needs import Memory, Model, Need, Package, Requires, RowSource, Server

KEY = "OWN_JUDGE_KEY"


class OwnJudge(Judge):
    """Asks a server, reads a model and rows, and needs a package and much memory."""

    def __init__(self, model: str, url: str = "http://judge/v1", gib: int = 1) -> None:
        raise AssertionError("a dry run makes no judge")

    @classmethod
    def requires(cls, settings: Mapping[str, Any]) -> list[Need]:
        return [
            Model(settings["model"]),
            Server(settings["url"], KEY),
            RowSource(VOTES, columns=(("prompt", "no_such_column"),)),
            Package("no_such_package", "no-such-package>=1"),
            Memory(settings["gib"] * 2**30, "the judge"),
        ]

    def verdicts(self, fields, ours, theirs):
        return []


class OwnAugmentation(Augmentation):
    """Reads a model."""

    def __init__(self, number: int, reader: str) -> None:
        super().__init__(number)
        self.reader = reader

    @classmethod
    def requires(cls, settings: Mapping[str, Any]) -> list[Need]:
        return [Model(settings["reader"])]

    def augment(self, clients, public, seed):
        raise AssertionError("a dry run augments nothing")


class OwnData(L.LightningDataModule):
    """Takes no arguments."""


@pytest.fixture
def project(monkeypatch):
    """The classes, in a package of their own."""
    module = ModuleType("own_project")
    for one in (OwnJudge, OwnAugmentation, OwnData):
        monkeypatch.setattr(one, "__module__", "own_project")
        setattr(module, one.__name__, one)
    monkeypatch.setitem(sys.modules, "own_project", module)


def dry_run(tmp_path, **stages):
    file = tmp_path / "own.yaml"
    file.write_text(json.dumps({"stages": stages}))
    outcome = fedlight("run", str(file), "--dry-run", f"--output={tmp_path / 'out'}")
    return outcome.code, " ".join(outcome.out.replace("│", " ").split())


def test_data_without_arguments_leave_a_training_uncounted(project, tmp_path):
    model = {"class_path": "SFTModule", "init_args": {"model": "toy"}}
    config = tmp_path / "fit.yaml"
    config.write_text(json.dumps({"model": model, "data": {"class_path": "own_project.OwnData"}}))
    code, told = dry_run(tmp_path, train={"fit": str(config)})
    assert code == 3
    assert "memory for toy unknown data.max_tokens is not set" in told


def duel(**settings):
    judge = {"class_path": "own_project.OwnJudge", "init_args": settings}
    given = {"methods": {}, "judge": judge, "task": "x", "output": "${run}/duel"}
    return {"call": "fedlight.judges.duels.duels", "with": given}


def test_all_that_a_judge_needs_is_in_the_table(project, tmp_path, monkeypatch):
    monkeypatch.delenv(KEY, raising=False)
    code, text = dry_run(tmp_path, duel=duel(model="./no/such", gib=2**20))
    assert code == 2
    assert "model ./no/such problem model='./no/such': there is no such folder" in text
    assert f"server http://judge/v1 problem the environment variable {KEY} is not set" in text
    assert "no column 'no_such_column' (mapped to 'prompt')" in text
    assert "no_such_package problem it is not installed: pip install no-such-package>=1, for duel" in text
    assert "memory of the judge problem 1125899.9 GB for duel; this machine has" in text


def test_with_all_of_it_there_the_run_can_start(project, tmp_path, monkeypatch):
    monkeypatch.setenv(KEY, "secret")
    there = [Model("toy"), Server("http://judge/v1", KEY), Package("json", "x")]
    monkeypatch.setattr(OwnJudge, "requires", lambda settings: there)
    code, text = dry_run(tmp_path, duel=duel(model="toy"))
    assert code == 0, text
    assert "secret" not in text


def test_an_augmentation_inside_a_datamodule(project, tmp_path):
    own = {"class_path": "own_project.OwnAugmentation", "init_args": {"number": 1, "reader": "./nor/this"}}
    settings = {"source": "toy:instructions", "public_source": "toy:instructions", "augmentation": own}
    data = {"class_path": "AugmentedInstructionDataModule", "init_args": settings}
    code, text = dry_run(tmp_path, train={"fit": "sft.yaml", "with": {"data": data}})
    assert code == 2
    assert "model ./nor/this problem model='./nor/this': there is no such folder" in text


def test_fedlights_own_classes_say_it_in_the_same_way():
    from fedlight.augmentation.less.less import LESS
    from fedlight.generators.endpoint import ChatEndpoint
    from fedlight.judges.rule_judges import LengthJudge
    from fedlight.modules.selector import SelectorModule

    assert isinstance(LESS, Requires)
    assert SelectorModule.requires({"model": "a/b"}) == [Model("a/b")]
    needs = [Server("u", None), Package("openai", "'fedlight[chat]'")]
    assert ChatEndpoint.requires({"base_url": "u", "api_key_variable": None}) == needs
    assert not isinstance(LengthJudge, Requires)
