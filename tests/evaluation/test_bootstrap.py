"""Bootstrap intervals: small cases that can be enumerated, clusters, and how often they hold the truth."""

import itertools
import math

import numpy as np
import pytest

from fedlight.evaluation.bootstrap import Interval, bootstrap_interval


def enumerated(sums, counts, level):
    """The exact interval: all draws of as many prompts as there are, each once."""
    means = [
        sum(sums[i] for i in draw) / sum(counts[i] for i in draw)
        for draw in itertools.product(range(len(sums)), repeat=len(sums))
    ]
    return np.quantile(means, [(1 - level) / 2, (1 + level) / 2])


@pytest.mark.parametrize("level", [0.6, 0.9])
def test_the_draws_are_those_that_could_be_made(level):
    values = [0.0, 0.5, 1.0, 1.0]
    exact = enumerated(values, [1] * 4, level)
    assert bootstrap_interval(values, level=level, draws=20_000) == pytest.approx(tuple(exact))
    # Prompts "a" (three answers) and "b", "c": 27 draws of prompts, weighted by their answers.
    values, prompts = [1, 0, 1, 0, 1], ["a", "b", "a", "a", "c"]
    exact = enumerated([2, 0, 1], [3, 1, 1], level)
    assert bootstrap_interval(values, prompts, level=level, draws=20_000) == pytest.approx(tuple(exact))


def test_the_interval_holds_the_truth_as_often_as_it_says():
    stream = np.random.default_rng(1)
    held = []
    for _ in range(250):
        low, high = bootstrap_interval(stream.random(60) < 0.6, draws=400)
        held.append(low <= 0.6 <= high)
    assert 0.9 <= np.mean(held) <= 0.98


def test_answers_to_one_prompt_are_one_draw():
    """Five times the same answer to 40 prompts: as wide as one answer each, and what ignores it is too narrow."""
    values = (np.random.default_rng(2).random(40) < 0.5).astype(float)
    one, five = (
        bootstrap_interval(values),
        bootstrap_interval(np.repeat(values, 5), np.repeat(np.arange(40), 5)),
    )
    assert five == one
    narrow = bootstrap_interval(np.repeat(values, 5))
    assert (narrow.high - narrow.low) < 0.6 * (one.high - one.low)


def test_chunks_of_draws_are_the_same_draws(monkeypatch):
    values = np.random.default_rng(3).random(50)
    whole = bootstrap_interval(values)
    monkeypatch.setattr("fedlight.evaluation.bootstrap.CELLS", 1000)  # twenty draws at once
    assert bootstrap_interval(values) == whole
    assert bootstrap_interval(values, seed=1) != whole


def test_what_is_unread_is_left_out_and_one_prompt_says_nothing():
    assert bootstrap_interval([1, math.nan, 0, 1, 1]) == bootstrap_interval([1, 0, 1, 1])
    for values, prompts in (([], None), ([1.0], None), ([1, 0, 1], ["a"] * 3), ([math.nan, 1], None)):
        assert all(math.isnan(end) for end in bootstrap_interval(values, prompts))
    assert bootstrap_interval([1.0] * 9) == Interval(1, 1)


def test_what_does_not_fit_is_refused():
    for options in ({"level": 0.0}, {"level": 1.0}, {"draws": 0}):
        with pytest.raises(ValueError, match=r"must lie between 0 and 1, and draws=\d+ be at least 1"):
            bootstrap_interval([0, 1], **options)
    with pytest.raises(ValueError, match="has 2 values, but 1 prompts"):
        bootstrap_interval([0, 1], ["a"])
