"""Constructors have few arguments: what is rarely written stands in dataclasses that YAML nests."""

from inspect import signature

import pytest

from fedlight.lightning_cli.class_names import CLASS_FILES, class_of

MOST = 12
NAMES = [name for name in CLASS_FILES if name.endswith("DataModule")]


@pytest.mark.parametrize("name", NAMES)
def test_a_constructor_has_few_arguments(name):
    assert len(signature(class_of(name)).parameters) <= MOST
