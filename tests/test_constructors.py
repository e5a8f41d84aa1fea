"""Constructors have few arguments: what is rarely written stands in dataclasses that YAML nests."""

from inspect import signature

import pytest

import fedlight

MOST = 12
NAMES = [name for name in fedlight.__all__ if name.endswith("DataModule")]


@pytest.mark.parametrize("name", NAMES)
def test_a_constructor_has_few_arguments(name):
    assert len(signature(getattr(fedlight, name)).parameters) <= MOST
