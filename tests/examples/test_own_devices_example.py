"""The example of a project's own devices: who computes how, and who not at all."""

import ast
import csv
import importlib.util
from collections import defaultdict
from pathlib import Path

import lightning as L

FILE = Path(__file__).parents[2] / "examples" / "own_devices.py"


def test_each_kind_of_device_does_what_it_can(tmp_path):
    spec = importlib.util.spec_from_file_location("own_devices", FILE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    L.seed_everything(0)
    assert example.federate(rounds=3, folder=str(tmp_path)) > 0.3  # chance is 0.1
    kinds = defaultdict(list)
    for row in csv.DictReader((tmp_path / "visits.csv").read_text().splitlines()):
        kinds[row["device"]].append(row)
    assert kinds.keys() == {"board", "tag", "raspberry_pi_5"}
    assert {row["reason"] for row in kinds["tag"]} == {"out_of_memory"}
    assert {row["reason"] for row in kinds["raspberry_pi_5"]} == {""}
    assert "" in {row["reason"] for row in kinds["board"]} <= {"", "absent", "surplus"}
    assert max(int(row["micro_batch"]) for row in kinds["board"] if int(row["examples"]) >= 32) == 16
    assert max(int(row["micro_batch"]) for row in kinds["raspberry_pi_5"]) == 32
    fit = [row for own in kinds.values() for row in own if row["reason"] != "out_of_memory"]
    assert all(int(row["peak_bytes"]) <= int(row["budget_bytes"]) for row in fit)
    assert all(int(row["peak_bytes"]) > int(row["budget_bytes"]) for row in kinds["tag"])


def test_module_and_data_know_nothing_of_it():
    tree = ast.parse(FILE.read_text())
    rest = [node for node in tree.body[1:] if getattr(node, "name", "") != "federate"]
    assert "fedlight" not in " ".join(ast.unparse(node) for node in rest)
