"""``--threads N`` reaches torch and the processes that a command starts, and is no key of a config."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_world import fedlight, refused

from fedlight.cli.main import VARIABLES, take_threads


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    for name in VARIABLES:
        monkeypatch.setenv(name, "1")
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("arguments", "others"),
    [
        (["--threads", "3", "fit", "--config", "a.yaml"], ["fit", "--config", "a.yaml"]),
        (["fit", "--config", "a.yaml", "--threads=3"], ["fit", "--config", "a.yaml"]),
        (["--threads=2", "run", "--threads", "3", "demo"], ["run", "demo"]),
    ],
)
def test_it_stands_anywhere_and_the_last_counts(arguments, others, monkeypatch):
    assert take_threads(arguments) == others
    assert torch.get_num_threads() == 3
    child = "import os; print(*(os.environ[name] for name in " + repr(VARIABLES) + "))"
    told = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["3", "3", "3"]


def test_without_it_nothing_is_changed(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    arguments = ["fit", "--data.num_threads", "4"]
    assert take_threads(arguments) == arguments
    assert torch.get_num_threads() == 1
    assert [os.environ[name] for name in VARIABLES] == ["5", "1", "1"]


def test_it_is_set_before_torch_is_imported(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    code = "from fedlight.cli.main import main; main(['--version', '--threads', '1']); import torch; "
    code += "print(torch.get_num_threads())"
    place = {"cwd": Path(__file__).parents[2], "check": True}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **place)
    assert done.stdout.split()[-1] == "1"


@pytest.mark.parametrize(
    "arguments", [["--threads"], ["--threads", "0"], ["--threads=two"], ["--threads=-1"]]
)
def test_no_number_of_threads(arguments):
    assert "--threads" in refused(fedlight("fit", *arguments))
    assert "needs a number of at least 1, as in --threads 1" in refused(fedlight("run", *arguments))


def test_every_help_names_it():
    assert all("--threads N" in fedlight(*command, "--help").out for command in ([], ["fit"], ["test"]))
