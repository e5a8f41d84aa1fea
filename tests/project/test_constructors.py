"""Constructors and recipe functions take few arguments: what is rarely written stands in dataclasses that YAML nests."""

import re
from inspect import signature

import pytest
from recipe_runs import stages_of

from fedlight.conf import path
from fedlight.lightning_cli.class_names import CLASS_FILES, class_of, find_object
from fedlight.recipes import recipe as recipes

MOST = 12


def number(made):
    return len([name for name in signature(made).parameters if name != "kwargs"])


def test_constructors_and_recipe_functions_have_few_arguments():
    assert [name for name in CLASS_FILES if (kind := class_of(name)) and number(kind) > MOST] == []
    calls = {
        function
        for file in path("recipes").rglob("*.yaml")
        for function in re.findall(r"\bcall: ([\w.]+)", file.read_text(encoding="utf-8"))
    }
    assert len(calls) > 20
    assert [name for name in sorted(calls) if number(find_object(name)) > MOST] == []


@pytest.mark.parametrize(
    ("name", "beside", "place"),
    [
        ("polis", "jury_share", "jury.share"),
        ("polis", "max_train", "bounds.max_train"),
        ("ukpconvarg", "column", "holdout.column"),
        ("fewfedpit_real", "num_test", "draw.num_test"),
    ],
)
def test_an_argument_beside_the_one_that_has_it_is_refused_with_its_place(name, beside, place, tmp_path):
    stages = stages_of(name, tmp_path)
    (stage,) = [stages[known] for known in ("opinions", "clients", "shots") if known in stages]
    stage.arguments[beside] = 1
    with pytest.raises(ValueError, match=rf"'{beside}'; did you mean '{place}'\?; see its docstring"):
        stage.call_arguments()


def test_so_is_a_value_of_a_recipe_and_nested_ones_are_checked_before_the_first_stage(tmp_path):
    with pytest.raises(ValueError, match=r"polis has no value 'max_test'; did you mean 'bounds\.max"):
        recipes.load("polis", ["max_test=3"])
    with pytest.raises(ValueError, match=r"jury\.share=2 must lie between 0 and 1"):
        stages_of("polis", tmp_path, "jury.share=2")["opinions"].call_arguments()
