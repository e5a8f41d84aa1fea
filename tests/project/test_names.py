"""Names say what they hold: no variable or argument of these rooms has a name that fits everything."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EMPTY = {"found", "own", "one", "of", "why"}
ROOMS = {
    "callbacks": ("attacks", "export", "logs", "loop", "progress", "scores"),
    "datamodules": ("",),
    "fedlight": (
        *("augmentation", "cli", "devices", "evaluation", "export", "federation", "first_config", "flower"),
        *("generators", "judges", "lightning_cli", "plan", "preflight", "pretrained", "processes"),
        *("recipes", "report", "runs", "stacking", "support", "toy"),
    ),
    "examples": ("",),
    "modules": ("",),
}


def empty_names(text):
    """Return the line and name of each binding and argument with an empty name."""
    for node in ast.walk(ast.parse(text)):
        name = node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else None
        name = node.arg if isinstance(node, ast.arg) else name
        name = node.name if isinstance(node, ast.ExceptHandler) else name
        if name in EMPTY:
            yield node.lineno, name


@pytest.mark.parametrize("room", [f"{top}/{room}" for top, rooms in ROOMS.items() for room in rooms])
def test_names_say_what_they_hold(room):
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    names = {str(file.relative_to(ROOT)): [*empty_names(file.read_text(encoding="utf-8"))] for file in files}
    assert {file: empty for file, empty in names.items() if empty} == {}


def test_empty_names_are_seen():
    text = "def f(own, *, why=1):\n    found = [one for one in own]\n    return found\n"
    text += "try:\n    f()\nexcept ValueError as why:\n    raise\n"
    assert sorted(empty_names(text)) == [(1, "own"), (1, "why"), (2, "found"), (2, "one"), (6, "why")]
