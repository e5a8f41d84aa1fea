"""Every listed dependency is used, and everything that is imported is listed, with a bound and a pin."""

import ast
import re
import sys
import tomllib
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IMPORT_NAMES = {
    "dp-accounting": "dp_accounting",
    "huggingface-hub": "huggingface_hub",
    "mkdocs-material": "mkdocs",  # which it brings
    "pycryptodome": "Crypto",
    "pyyaml": "yaml",
    "rouge-score": "rouge_score",
    "scikit-learn": "sklearn",
    "sentence-transformers": "sentence_transformers",
}
# What the package imports only where it is asked for.
EXTRAS = ("privacy", "hnsw", "chat", "onnx", "executorch", "flower")
# One is compiled, the others are large or pin much: their tests are skipped without them.
NOT_IN_DEV = ("hnsw", "flower", "executorch")
# Started by the Makefile, imported by nobody.
TOOLS = {"mypy", "pre-commit", "pytest-cov", "pytest-xdist", "ruff"}


def names(requirements: list[str]) -> set[str]:
    """Distribution names of requirement strings."""
    return {re.split(r"[\[<>=!~ ]", requirement, maxsplit=1)[0] for requirement in requirements}


def imports(*folders: str) -> set[str]:
    """Top-level packages from outside that the Python files of the folders import."""
    found: set[str] = set()
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add((node.module or "").split(".")[0])
    # What tests or benchmarks share, and what an example imports of itself, standing in its own folder.
    rooms = ("tests/support", "tests/conformance", "examples", "benchmarks")
    beside = [path for folder in rooms for path in (ROOT / folder).rglob("*.py")]
    own = {name for path in beside for name in (path.stem, path.parent.name)}
    return found - set(sys.stdlib_module_names) - own - {"fedlight", "examples"}


PACKAGE = ("fedlight", "modules", "datamodules", "callbacks")
OPTIONAL = PROJECT["optional-dependencies"]
RUNTIME = {
    IMPORT_NAMES.get(name, name)
    for requirements in (PROJECT["dependencies"], *(OPTIONAL[extra] for extra in EXTRAS))
    for name in names(requirements)
}
BY_TRANSFORMERS = {"gguf", "executorch", "onnx", "onnxruntime", "onnxscript"}
"""What the exporters of transformers import, and fedlight does not itself."""
PEERS = {"pfl", "trl"}
"""What benchmarks/peers.py and trl_trainers.py measure beside fedlight, each in an environment of its own."""
DEVELOPMENT = {IMPORT_NAMES.get(name, name) for name in names(OPTIONAL["dev"]) - TOOLS}


def test_what_is_imported_is_listed_and_what_is_listed_imported():
    assert imports(*PACKAGE) == RUNTIME - BY_TRANSFORMERS
    used = imports("tests", "examples", "benchmarks", "docs")
    assert used <= RUNTIME | DEVELOPMENT | PEERS
    assert used - imports("tests", "examples", "docs") >= PEERS
    # setuptools is named in a program that tests/project/test_wheel.py starts, mkdocstrings in mkdocs.yml, ipykernel is
    # started by nbclient; tests skip where playwright cannot be imported; tensorboard and wandb are Lightning's loggers'
    named = {"ipykernel", "mkdocstrings", "playwright", "setuptools", "tensorboard", "wandb"}
    assert used >= DEVELOPMENT - RUNTIME - named


def test_development_has_every_extra_that_is_small_and_hnswlib_is_tried():
    assert {*EXTRAS, "dev"} == set(OPTIONAL)
    for extra in EXTRAS:
        assert (names(OPTIONAL[extra]) <= names(OPTIONAL["dev"])) == (extra not in NOT_IN_DEV)
    makefile = (ROOT / "Makefile").read_text()
    tried = makefile.partition("$(VENV)/.dev:")[2]
    assert "--editable '.[dev,flower]'" in tried
    assert tried.count(" hnswlib ") == 2  # compiled, and installed
    assert "could not be compiled" in makefile


def test_every_requirement_has_a_lower_bound_below_its_pin():
    pattern = r"([\w-]+)(?:\[[\w,]+\])?>=([\d.]+)(?:,<([\d.]+))?"
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [line for line in lines if "==" in line and not line.startswith("#")]
    pins = dict(line.lower().replace("_", "-").split("==") for line in pinned)
    for requirement in {*PROJECT["dependencies"], *chain(*OPTIONAL.values())}:
        name, *bounds = re.fullmatch(pattern, requirement).groups("9999")
        versions = (bounds[0], pins[name], bounds[1])
        least, pin, above = (tuple(map(int, version.split("."))) for version in versions)
        assert least <= pin < above, requirement
