"""Commands and recipes that end well, and what they leave."""

import json
from pathlib import Path
from typing import Any

from tiny_world import Outcome, fedlight

from fedlight.recipes import recipe as recipes
from fedlight.recipes.stages import Stage


def ran(*arguments: str) -> Outcome:
    """Run ``fedlight ARGUMENTS``, which has to end well."""
    outcome = fedlight(*arguments)
    assert outcome.code == 0, outcome.out[-2000:] + outcome.err
    return outcome


def rows_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Rows of a recipe's results by method, of one seed."""
    rows = json.loads((folder / "results.json").read_text())["rows"]
    return {row["method"]: row for row in rows}


def stages_of(name: str, folder: Path, *changes: str, seed: int = 0, twin: bool = False) -> dict[str, Stage]:
    """Stages of a recipe with some changes, by name."""
    told = recipes.load(name, list(changes), twin)
    return {stage.name: stage for stage in recipes.stages(told, folder, seed)}


def differing(one: dict, other: dict) -> set:
    """Keys under which two settings differ, or that only one has."""
    return {key for key in {**one, **other} if one.get(key, "none") != other.get(key, "none")}


def is_drawn(file: Path) -> bool:
    """Whether the file is an SVG."""
    return "<svg" in file.read_text()[:1000]
