"""The examples of one file: a project that knows nothing of fedlight, in few lines, and with devices of its own."""

import ast
import runpy
from collections import defaultdict
from pathlib import Path

import lightning as L
from tiny_world import table

EXAMPLES = Path(__file__).parents[2] / "examples"


def federate(name, **settings):
    L.seed_everything(0)
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["federate"](**settings)


def split(name):
    """The function ``federate`` of an example, and the code around it below its docstring."""
    nodes = ast.parse((EXAMPLES / f"{name}.py").read_text()).body[1:]
    (added,) = [node for node in nodes if getattr(node, "name", "") == "federate"]
    return added, " ".join(ast.unparse(node) for node in nodes if node is not added)


def test_the_digits_are_learned_in_a_federation_by_fewer_than_fifteen_lines():
    assert federate("plug_in", rounds=20) > 0.7  # chance is 0.1
    added, rest = split("plug_in")
    assert added.end_lineno - added.body[1].lineno + 1 < 15  # below its docstring
    assert "fedlight" not in rest


def test_each_kind_of_device_does_what_it_can(tmp_path):
    assert federate("own_devices", rounds=3, folder=str(tmp_path)) > 0.3  # chance is 0.1
    kinds = defaultdict(list)
    for row in table(tmp_path / "visits.csv"):
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
    assert "fedlight" not in split("own_devices")[1]
