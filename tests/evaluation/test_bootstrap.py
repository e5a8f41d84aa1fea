import itertools
import math

import numpy as np
import pytest

from fedlight.evaluation.bootstrap import Interval, bootstrap_interval, seeds_needed, student_interval


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
    one = bootstrap_interval(values)
    assert bootstrap_interval(np.repeat(values, 5), np.repeat(np.arange(40), 5)) == one
    narrow = bootstrap_interval(np.repeat(values, 5))
    assert (narrow.high - narrow.low) < 0.6 * (one.high - one.low)


def test_chunks_of_draws_are_the_same_draws(monkeypatch):
    values = np.random.default_rng(3).random(50)
    whole = bootstrap_interval(values)
    monkeypatch.setattr("fedlight.evaluation.bootstrap.CELLS", 1000)  # twenty draws at once
    assert bootstrap_interval(values) == whole
    assert bootstrap_interval(values, seed=1) != whole


def test_what_is_unread_is_left_out_and_what_does_not_fit_is_refused():
    assert bootstrap_interval([1, math.nan, 0, 1, 1]) == bootstrap_interval([1, 0, 1, 1])
    for values, prompts in (([], None), ([1.0], None), ([1, 0, 1], ["a"] * 3), ([math.nan, 1], None)):
        assert all(math.isnan(end) for end in bootstrap_interval(values, prompts))
    assert bootstrap_interval([1.0] * 9) == Interval(1, 1)
    for options in ({"level": 0.0}, {"level": 1.0}, {"draws": 0}):
        with pytest.raises(ValueError, match=r"must lie between 0 and 1, and draws=\d+ be at least 1"):
            bootstrap_interval([0, 1], **options)
    with pytest.raises(ValueError, match="has 2 values, but 1 prompts"):
        bootstrap_interval([0, 1], ["a"])


def test_students_interval_holds_the_truth_with_few_seeds():
    """Of 2,000 samples of four values; the percentile bootstrap of four values is too short."""
    stream = np.random.default_rng(2)
    samples = stream.normal(0.3, 2.0, (2000, 4))
    held = [low <= 0.3 <= high for low, high in map(student_interval, samples)]
    assert np.mean(held) == pytest.approx(0.95, abs=0.015)  # three standard errors
    short = [low <= 0.3 <= high for low, high in (bootstrap_interval(s, draws=200) for s in samples[:400])]
    assert np.mean(short) < 0.88


def test_students_interval_of_three_values():
    """t of two degrees of freedom at 0.975 is 4.302653; the deviation of 1, 2, 6 is sqrt(7)."""
    half = 4.302653 * math.sqrt(7 / 3)
    assert student_interval([1, 2, 6]) == pytest.approx((3 - half, 3 + half), abs=1e-5)
    assert all(math.isnan(end) for end in student_interval([1.0]))
    assert student_interval([0.5, 0.5]) == (0.5, 0.5)


def test_so_many_seeds_find_the_difference_as_often_as_asked():
    """At 24 seeds a difference of 0.03 with a deviation of 0.05 is told from zero in 0.8 of all samples."""
    number = seeds_needed(0.05, 0.03)
    samples = np.random.default_rng(3).normal(0.03, 0.05, (3000, number))
    means, errors = samples.mean(axis=1), samples.std(axis=1, ddof=1) / math.sqrt(number)
    found = means > 2.0686576 * errors  # t of 23 degrees of freedom at 0.975
    assert number == 24
    assert np.mean(found) == pytest.approx(0.8, abs=0.03)
    assert seeds_needed(0.0, 0.03) == 2
    assert seeds_needed(1000.0, 0.03) == pytest.approx(((1.959964 + 0.841621) * 1000 / 0.03) ** 2, rel=1e-6)
    for name, value in (("difference", 0.0), ("deviation", -1.0), ("deviation", math.inf)):
        with pytest.raises(ValueError, match=f"{name}={value}"):
            seeds_needed(**{"deviation": 0.1, "difference": 0.03, name: value})
