import logging
import re

import pytest
from recipe_runs import ran
from tiny_world import fedlight

from fedlight.support.files import result_of

pytestmark = pytest.mark.slow
CELLS = ("mean_nobody", "mean_flip_30", "multi_krum_flip_30", "mean_flipped_votes_30")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("liars")
    few = ["num_clients=10", "votes_per_client=20", "rounds=3", "local_steps=2", "batch_size=8"]
    said, logger = [], logging.getLogger("lightning.pytorch.utilities.rank_zero")
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(handler)  # Lightning's own writes to the stderr of its import
    try:
        outcome = fedlight("run", "liars", "--seeds", "0", "--only", *CELLS, f"--output={folder}", *few)
    finally:
        logger.removeHandler(handler)
    assert outcome.code == 0, outcome.err
    return folder / "seed0", "\n".join(said)


def test_the_same_clients_lie_in_updates_and_in_votes_and_do_harm(run):
    lines = dict(re.findall(r"(\d+ of 10 clients lie \([^)]*\)): (.*)", run[1]))
    assert {*lines} == {"3 of 10 clients lie (flip, 4 times)", "3 of 10 clients lie (votes flipped)"}
    assert len({*lines.values()}) == 1
    losses = {cell: result_of(run[0] / cell)["metrics"]["val/loss"] for cell in CELLS}
    assert losses["mean_flip_30"] > losses["multi_krum_flip_30"]
    assert losses["mean_flipped_votes_30"] > losses["mean_nobody"]


def test_the_twin_of_the_recipe_on_a_real_model(tmp_path):
    few = ["rounds=1", "taught_rounds=1", "local_steps=1", "asked=8"]
    cells = ("mean_nobody", "mean_flip_30", "mean_backdoor_30")
    ran("run", "liars_real", "--twin", "--seeds", "0", "--only", *cells, f"--output={tmp_path}", *few)
    logged = {cell: result_of(tmp_path / "seed0" / cell)["metrics"] for cell in cells}
    assert logged["mean_flip_30"]["val/loss"] > logged["mean_nobody"]["val/loss"]
    assert 0 <= logged["mean_backdoor_30"]["attack/backdoor/success"] <= 1
