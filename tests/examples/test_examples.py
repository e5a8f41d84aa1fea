"""The plug-in example federates a project that knows nothing of fedlight, in few lines."""

import ast
import importlib.util
from pathlib import Path

import lightning as L

FILE = Path(__file__).parents[2] / "examples" / "plug_in.py"


def test_the_digits_are_learned_in_a_federation():
    spec = importlib.util.spec_from_file_location("plug_in", FILE)
    plug_in = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plug_in)
    L.seed_everything(0)
    assert plug_in.federate(rounds=20) > 0.7  # chance is 0.1


def test_fewer_than_fifteen_lines_are_added_and_the_rest_knows_nothing_of_them():
    tree = ast.parse(FILE.read_text())
    added = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "federate")
    assert added.end_lineno - added.body[1].lineno + 1 < 15  # below its docstring
    rest = [node for node in tree.body if node is not added]
    assert "fedlight" not in " ".join(ast.unparse(node) for node in rest[1:])
