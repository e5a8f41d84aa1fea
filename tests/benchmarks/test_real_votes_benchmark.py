"""The pure parts of benchmarks/real_votes.py, and that conf/ukpconvarg*.yaml hold out what its fold 0 does."""

import doctest
import importlib.util
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

ROOT = Path(__file__).resolve().parents[2]
DEBATES = (
    "christianity-or-atheism-",
    "evolution-vs-creation",
    "firefox-vs-internet-explorer",
    "human-growth-and-development-should-parents-use-spanking-as-an-option-to-discipline-",
    "if-your-spouse-committed-murder-and-he-or-she-confided-in-you-would-you-turn-them-in-",
    "india-has-the-potential-to-lead-the-world-",
    "is-porn-wrong-",
    "is-the-school-uniform-a-good-or-bad-idea-",
    "personal-pursuit-or-advancing-the-common-good-",
    "should-physical-education-be-mandatory-in-schools-",
    "tv-is-better-than-books",
    "william-farquhar-ought-to-be-honoured-as-the-rightful-founder-of-singapore",
)


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("real_votes", ROOT / "benchmarks" / "real_votes.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_examples_of_the_docstrings(benchmark):
    found = doctest.testmod(benchmark)
    assert found.attempted >= 6
    assert found.failed == 0


def test_four_folds_hold_out_every_debate_once(benchmark):
    folds = [benchmark.held_out(DEBATES, fold) for fold in range(4)]
    assert sorted(debate for fold in folds for debate in fold) == sorted(DEBATES)
    with pytest.raises(ValueError, match="12 debates make 4 folds"):
        benchmark.held_out(DEBATES, 4)


@pytest.mark.parametrize("name", ["ukpconvarg", "ukpconvarg_choice"])
def test_the_configs_hold_out_fold_0(benchmark, name):
    config = OmegaConf.load(ROOT / "conf" / f"{name}.yaml")
    values = config["data"]["init_args"]["holdout"]["values"]
    assert {value.removesuffix("_*") for value in values} == benchmark.held_out(DEBATES, 0)


def test_two_orders_are_averaged_for_the_same_pair(benchmark):
    # Pair 0 is asked as rows 0 and 1, pair 3 as rows 6 and 7; the order in which they were scored is mixed.
    rows, labels = np.array([7, 0, 6, 1]), np.array([1, 0, 0, 1])
    log_odds = np.array([-0.5, -2.0, -3.0, -1.0])
    # Single orders: 7 wrong, 0 right, 6 right, 1 wrong. Row 7 less row 6: 2.5, B, right; row 0 less row 1: -1, A, right.
    assert benchmark.accuracies(rows, labels, log_odds) == (0.5, 1.0)


def test_sample_keeps_the_order_and_is_always_the_same(benchmark):
    pairs = [{"n": n} for n in range(20)]
    assert benchmark.sample(pairs, 0) == pairs
    few = benchmark.sample(pairs, 5)
    assert len(few) == 5
    assert few == benchmark.sample(pairs, 5)
    assert [pair["n"] for pair in few] == sorted(pair["n"] for pair in few)
