"""Finds the package beside the measurements; behind all others, as these have names of packages, such as coverage.py."""

import logging
import sys
from pathlib import Path

import lightning.pytorch  # noqa: F401  (gives its logger a level)
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture(scope="module", autouse=True)
def loud_lightning():
    """A measurement quietens Lightning for its process, which is that of the tests here: later ones read what it says."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    yield
    logger.setLevel(level)
