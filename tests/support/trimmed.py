"""A recipe without some of its stages, where others do the same with other settings."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedlight.recipes import recipe as recipes


def trimmed(name: str, folder: Path, *left_out: str, **first_axes: dict[str, Any]) -> str:
    """Writes the recipe without these stages, and without what tables and figures show of them; gives the file's name.

    Stages of a grid go with ``first_axes``: the first axis that this grid still has.
    """
    recipe = recipes.load(name)
    stages = recipe["stages"]
    assert set(left_out) <= {*stages, *(stage.name for stage in recipes.stages(recipe, folder, 0))}
    for stage, axis in first_axes.items():
        stages[stage]["grid"][0] = axis
    for stage, spec in stages.items():
        if stage in left_out:
            spec["when"] = False
        elif "like" in spec:
            spec.setdefault("when", True)  # or it is left out like the one that it is like
    folders = {f"${{run}}/{place}{stage}" for stage in left_out for place in ("", "augmentations/")}
    folders |= {f"${{every:{stage}}}" for stage in left_out}
    methods: set[str] = set()  # that stand in a table no more
    recipe["stages"] = _without(stages, lambda value: value in folders, methods)
    figures = recipe.get("over_seeds", {})
    recipe["over_seeds"] = _without(figures, lambda value: value in folders | methods, set())
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(recipe))
    return str(file)


def _without(spec: Any, is_gone: Callable[[Any], bool], keys: set[str]) -> Any:
    """Leaves out what is gone, and groups that have become empty; ``keys`` gets the names under which that stood."""
    if not isinstance(spec, dict):
        return spec
    keys |= {key for key, value in spec.items() if isinstance(value, str) and is_gone(value)}
    kept = {
        key: _without(value, is_gone, keys)
        for key, value in spec.items()
        if not (isinstance(value, str) and is_gone(value))
    }
    return {key: value for key, value in kept.items() if value != {} or spec[key] == {}}
