"""benchmarks/estimators.py at a tiny size: its errors shrink with the prompts, and its intervals hold the truth."""

from functools import partial

import pytest

pytestmark = pytest.mark.slow  # a whole benchmark


@pytest.fixture(scope="module")
def rows(benchmark, measured):
    benchmark.PROMPTS = (30, 805)
    benchmark.bootstrap_interval = partial(benchmark.bootstrap_interval, draws=200)
    found = measured("--runs", "3", "--intervals", "40")["rows"]
    return {(row["what"], row["prompts"]): row for row in found}


def test_the_correction_comes_nearer_with_more_prompts(rows):
    for kind in ("soft", "hard"):
        few, many = rows[kind, "30 prompts"], rows[kind, "805 prompts"]
        assert many["rmse"] < few["rmse"] <= few["largest"]
        assert many["largest"] < many["raw_low"] <= many["raw_high"]
    assert rows["soft", "805 prompts"]["rmse"] < rows["hard", "805 prompts"]["rmse"]


def test_a_judge_of_length_alone_and_pairs_of_a_prompt(rows):
    found = rows["length alone", "2000 prompts"]
    assert 0.4 < found["lowest"] <= found["highest"] < 0.6
    for prompts in ("20 prompts", "60 prompts", "200 prompts"):
        held = {name: rows[name, prompts]["held"] for name in ("one pair a prompt", "several pairs a prompt")}
        assert min(held.values()) > rows["pairs drawn", prompts]["held"] + 0.1
