"""Finds the package beside the measurements; behind all others, as these have names of packages, such as coverage.py."""

import importlib.util
import json
import logging
import sys
from pathlib import Path

import lightning.pytorch  # noqa: F401  (gives its logger a level)
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))


@pytest.fixture(scope="module")
def benchmark(request):
    """The measurement that the test's file is named for, ``test_NAME_benchmark.py``, as a new module."""
    name = request.path.stem.removeprefix("test_").removesuffix("_benchmark")
    spec = importlib.util.spec_from_file_location(f"{name}_benchmark", BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses, and parsers of its classes, look for it
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def measured(benchmark, tmp_path_factory):
    """Runs the measurement with arguments and gives what it wrote as JSON."""

    def measure(*arguments):
        file = tmp_path_factory.mktemp("measured") / "found.json"
        benchmark.main([*arguments, "--json", str(file)])
        return json.loads(file.read_text())

    return measure


@pytest.fixture(scope="module", autouse=True)
def loud_lightning():
    """A measurement quietens Lightning for its process, which is that of the tests here: later ones read what it says."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    yield
    logger.setLevel(level)
