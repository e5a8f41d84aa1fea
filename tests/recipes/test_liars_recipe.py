import logging
import re

import pytest
from recipe_runs import ran, stages_of
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


def test_the_same_clients_lie_in_updates_and_in_votes(run):
    lines = dict(re.findall(r"(\d+ of 10 clients lie \([^)]*\)): (.*)", run[1]))
    assert {*lines} == {"3 of 10 clients lie (flip, 4 times)", "3 of 10 clients lie (votes flipped)"}
    assert len({*lines.values()}) == 1


def test_cells_differ_as_they_should(run):
    losses = {cell: result_of(run[0] / cell)["metrics"]["val/loss"] for cell in CELLS}
    assert losses["mean_flip_30"] > losses["multi_krum_flip_30"]
    assert losses["mean_flipped_votes_30"] > losses["mean_nobody"]


def test_the_table_has_every_aggregation_under_every_lie(tmp_path):
    stages = stages_of("liars", tmp_path)
    cells = [*stages["table"].arguments["methods"].values()]
    assert len(cells) == 8
    assert {len(row) for row in cells} == {9}
    folders = [folder.rpartition("/")[2] for row in cells for folder in row.values()]
    assert sorted(folders) == sorted({*stages} - {"table", "together"})


def test_the_twin_of_the_recipe_on_a_real_model(tmp_path):
    few = ["rounds=1", "taught_rounds=1", "local_steps=1", "asked=8"]
    cells = ("mean_nobody", "mean_flip_30", "mean_backdoor_30")
    ran("run", "liars_real", "--twin", "--seeds", "0", "--only", *cells, f"--output={tmp_path}", *few)
    logged = {cell: result_of(tmp_path / "seed0" / cell)["metrics"] for cell in cells}
    assert logged["mean_flip_30"]["val/loss"] > logged["mean_nobody"]["val/loss"]
    assert 0 <= logged["mean_backdoor_30"]["attack/backdoor/success"] <= 1


def test_the_tables_on_a_real_model_have_every_aggregation_under_every_lie(tmp_path):
    stages = stages_of("liars_real", tmp_path, "votes=v", "gold=g", "rows=r")
    folders = set()
    for table, lies in (("table", 4), ("opened", 3)):
        rows = [*stages[table].arguments["methods"].values()]
        assert [len(row) for row in rows] == [lies] * 4
        folders |= {folder.rpartition("/")[2] for row in rows for folder in row.values()}
    assert {*stages} - folders == {"clients", "gold_pairs", "rows", "table", "opened", "without_phrase"}
