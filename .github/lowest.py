"""Print pip constraints with the lower bounds of pyproject.toml, as exact versions.

What they bring is not bound: pip takes the newest that they admit.
"""

import re
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def lowest_bounds(project: dict) -> list[str]:
    """Return ``name==version`` of each runtime dependency and of those that the extras of a small install bring."""
    extras = project["optional-dependencies"]
    listed = [*project["dependencies"], *extras["privacy"], *extras["chat"], *extras["hnsw"]]
    return [re.sub(r"\[.*?\]", "", requirement).replace(">=", "==") for requirement in listed]


if __name__ == "__main__":
    print("\n".join(lowest_bounds(PROJECT)))
