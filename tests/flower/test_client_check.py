import importlib.metadata

import pytest
from tiny_world import fedlight, tiny_selector


@pytest.fixture(autouse=True)
def flwr_is_installed(monkeypatch):
    versions = {"flwr": lambda name: "1.41.0"}
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: versions.get(name, real)(name))


@pytest.fixture
def check(tiny_model, tmp_path):
    return lambda *more: fedlight("client", "check", *tiny_selector(tiny_model, tmp_path / "run", *more))


def test_a_machine_that_can_take_part(check):
    outcome = check()
    assert outcome.code == 0, outcome.err
    for text in ("flwr 1.41.0", "FedAvg", "6 clients with", "0 examples too long", "trained parameters"):
        assert text in outcome.out
    assert outcome.out.splitlines()[-1] == "this machine can take part"


def test_too_little_memory_is_found_before_data_and_model(check):
    outcome = check("--memory-gib=0.00001")
    assert outcome.code == 2
    assert "does not even hold the weights" in " ".join(outcome.out.replace("│", " ").split())
    assert "clients with" not in outcome.out
    assert outcome.out.splitlines()[-1] == "this machine cannot take part: mend memory"


@pytest.mark.parametrize(
    ("setting", "line", "text"),
    [
        ("--federated.fleet=devices/fleets/phones.yaml", "mend config", "fleet=Fleet does not work"),
        ("--data.init_args.source=/nowhere/votes.jsonl", "mend data", "/nowhere/votes.jsonl"),
    ],
)
def test_what_is_wrong_is_named(check, setting, line, text):
    outcome = check(setting)
    assert outcome.code == 2
    assert text in outcome.out
    assert outcome.out.splitlines()[-1] == f"this machine cannot take part: {line}"


def test_no_flower(check, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("fedlight.cli.client_check.importlib.metadata.version", missing)
    outcome = check("--trainer.precision=16-mixed")
    assert outcome.code == 2
    assert "flwr is missing: pip install 'fedlight[flower]'" in outcome.out
