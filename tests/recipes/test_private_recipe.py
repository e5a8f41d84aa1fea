"""Cells of the recipe of clients' differential privacy, in a tiny form: the noise follows from epsilon and the cohort."""

import pytest
from tiny_world import fedlight

from fedlight.recipes import recipe as recipes
from fedlight.support.files import result_of

pytestmark = pytest.mark.slow
EPSILONS = ("no_privacy", "epsilon_8", "epsilon_1")


def test_less_epsilon_costs_more(tmp_path):
    cells = [f"{name}_100_clients" for name in EPSILONS]
    few = ["heldout=500", "rounds=3", "local_steps=2"]
    outcome = fedlight("run", "private", "--seeds", "0", "--only", *cells, f"--output={tmp_path}", *few)
    assert outcome.code == 0, outcome.err
    metrics = [result_of(tmp_path / "seed0" / cell)["metrics"] for cell in cells]
    without, eight, single = (each["val/loss"] for each in metrics)
    assert without < eight < single
    assert "fed/epsilon" not in metrics[0]
    # The noise is a bound's, so a run spends a little less.
    assert [each["fed/epsilon"] for each in metrics[1:]] == pytest.approx([8, 1], rel=0.02)


def test_the_table_has_every_epsilon_for_every_number_of_clients(tmp_path):
    stages = {stage.name: stage for stage in recipes.stages(recipes.load("private"), tmp_path, 0)}
    cells = [*stages["table"].arguments["methods"].values()]
    assert [len(row) for row in cells] == [3] * 5
    folders = [folder.rpartition("/")[2] for row in cells for folder in row.values()]
    assert sorted(folders) == sorted({*stages} - {"table"})
