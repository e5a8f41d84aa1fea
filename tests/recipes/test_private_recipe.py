import pytest
from recipe_runs import differing, ran, stages_of

from fedlight.support.files import result_of

pytestmark = pytest.mark.slow
EPSILONS = ("no_privacy", "epsilon_8", "epsilon_1", "epsilon_8_noise_of_each")


def metrics_of(recipe, tmp_path, cells, **changes):
    changed = [f"{name}={value}" for name, value in changes.items()]
    ran("run", recipe, "--seeds", "0", "--only", *cells, f"--output={tmp_path}", *changed)
    return [result_of(tmp_path / "seed0" / cell)["metrics"] for cell in cells]


def test_less_epsilon_costs_more(tmp_path):
    cells = [f"{name}_100_clients" for name in EPSILONS]
    metrics = metrics_of("private", tmp_path, cells, heldout=500, rounds=3, local_steps=2)
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
    trusted, shared = metrics_of("private", tmp_path, cells, heldout=2000, rounds=3, local_steps=2)
    assert shared["fed/epsilon_sum"] == pytest.approx(8, rel=0.02)
    assert shared["val/loss"] == pytest.approx(trusted["val/loss"], abs=0.05)


def test_each_method_spends_its_epsilon(tmp_path):
    cells = ["fedbis_clients_in_turn_epsilon_8", "fedbis_examples_epsilon_1"]
    few = {"heldout": 500, "selector_rounds": 3, "vote_rounds": 2}
    turns, examples = metrics_of("private_methods", tmp_path, cells, **few)
    assert turns["fed/epsilon"] == pytest.approx(8, rel=1e-3)
    assert examples["fed/epsilon_example"] == pytest.approx(1, rel=1e-3)
    cells = ["sft_clients_epsilon_2", "sft_examples_epsilon_4", "fewfedpit_clients_epsilon_1"]
    small = {"clients_per_round": 4, "row_cohort": 3, "at_once": 2, "number": 2, "keep": 1, "rounds": 2}
    source = "toy:instructions?split=private&client_rows=10&num_clients=8&joined=1"
    metrics = metrics_of("private_methods", tmp_path / "m", cells, writer="toy", source=source, **small)
    assert metrics[0]["fed/epsilon"] == pytest.approx(2, rel=0.02)
    assert metrics[1]["fed/epsilon_example"] == pytest.approx(4, rel=1e-3)
    assert metrics[2]["fed/epsilon"] == pytest.approx(1, rel=0.02)
    assert metrics[2]["fed/synthetic/clients"] == 4


def test_rows_of_a_method_differ_from_no_privacy_in_the_noise_alone(tmp_path):
    stages = stages_of("private_methods", tmp_path)
    rows = {}
    for grid in stages["table"].arguments["methods"]:
        rows |= grid
    assert [*rows] == [
        *("FedBis, clients, secret cohorts", "FedBis, clients in turn", "FedBis, examples"),
        *("SFT, clients", "SFT, examples", "FewFedPIT, clients"),
    ]
    for method, settings in rows.items():
        cells = [stages[folder.rpartition("/")[2]].arguments for folder in settings.values()]
        clipping = ["clipping alone"] if "clients" in method else []
        assert [*settings] == ["no privacy", *clipping, *(f"epsilon {number}" for number in (8, 4, 2, 1))]
        for cell in cells[1:]:
            noise = {name.partition(".init_args")[0] for name in differing(cells[0], cell)}
            noise -= {"trainer.gradient_clip_val"}
            assert noise in ({"federated.aggregation"}, {"federated.parts"})
