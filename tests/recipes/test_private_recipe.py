"""Cells of the recipe of clients' differential privacy, in a tiny form: the noise follows from epsilon and the cohort."""

import pytest
from tiny_world import fedlight

from fedlight.recipes import recipe as recipes
from fedlight.support.files import result_of

pytestmark = pytest.mark.slow
EPSILONS = ("no_privacy", "epsilon_8", "epsilon_1", "epsilon_8_noise_of_each")


def test_less_epsilon_costs_more(tmp_path):
    cells = [f"{name}_100_clients" for name in EPSILONS]
    few = ["heldout=500", "rounds=3", "local_steps=2"]
    outcome = fedlight("run", "private", "--seeds", "0", "--only", *cells, f"--output={tmp_path}", *few)
    assert outcome.code == 0, outcome.err
    metrics = [result_of(tmp_path / "seed0" / cell)["metrics"] for cell in cells]
    without, eight, single, alone = (each["val/loss"] for each in metrics)
    assert without < eight < single
    assert eight < alone  # the noise of a hundred clients
    assert "fed/epsilon" not in metrics[0]
    # The noise is a bound's, so a run spends a little less.
    assert [each["fed/epsilon"] for each in metrics[1:3]] == pytest.approx([8, 1], rel=0.02)
    assert metrics[3]["fed/epsilon_local"] == pytest.approx(8, rel=0.02)


def test_noise_that_clients_share_costs_what_that_of_a_trusted_server_costs(tmp_path):
    """Where all take part in each round, which the server may know."""
    cells = ["epsilon_8_100_clients", "epsilon_8_shared_noise_100_clients"]
    few = ["heldout=2000", "rounds=3", "local_steps=2"]
    outcome = fedlight("run", "private", "--seeds", "0", "--only", *cells, f"--output={tmp_path}", *few)
    assert outcome.code == 0, outcome.err
    trusted, shared = (result_of(tmp_path / "seed0" / cell)["metrics"] for cell in cells)
    assert shared["fed/epsilon_sum"] == pytest.approx(8, rel=0.02)
    assert shared["val/loss"] == pytest.approx(trusted["val/loss"], abs=0.05)


def test_the_table_has_every_epsilon_for_every_number_of_clients(tmp_path):
    stages = {stage.name: stage for stage in recipes.stages(recipes.load("private"), tmp_path, 0)}
    cells = [*stages["table"].arguments["methods"].values()]
    assert [len(row) for row in cells] == [3] * 7
    folders = [folder.rpartition("/")[2] for row in cells for folder in row.values()]
    assert sorted(folders) == sorted({*stages} - {"table"})
