import math

import numpy as np
import pytest

from fedlight.evaluation.agreement import Judged, adjusted_rand_index, agreement, majority

NAN = math.nan
PAIRS = [
    Judged([1, 1, 0], 1, "q"),  # majority 1
    Judged([1, 0], 0, "q"),  # none
    Judged([0.5, 0.5, 1], 1, "r"),  # a tie; without ties 1
    Judged([0], 0.5, "r"),  # 0; the judge has not decided
    Judged([0, 0], NAN, "s"),  # not read
]


def partition(numbers):
    return {f"c{i}": int(number) for i, number in enumerate(numbers)}


def test_names_and_partitions_without_pairs_to_tell_apart():
    known = {f"c{i}": name for i, name in enumerate("yyxzz")}
    assert adjusted_rand_index(partition([0, 0, 1, 2, 2]), known) == 1.0
    assert adjusted_rand_index(partition([0, 0, 0]), partition([1, 1, 1])) == 1.0
    assert adjusted_rand_index(partition([0, 1, 2]), partition([2, 1, 0])) == 1.0
    assert adjusted_rand_index(partition([0]), partition([0])) == 1.0
    assert adjusted_rand_index(partition([0, 0, 0]), partition([0, 1, 2])) == 0.0


def test_pairs_that_chance_would_give_are_taken_off():
    """One pair of two is together in both; by chance a third of a pair would be."""
    found, known = partition([0, 0, 1, 1]), partition([0, 0, 1, 2])
    assert adjusted_rand_index(found, known) == pytest.approx((1 - 1 / 3) / (1.5 - 1 / 3))


def test_only_clients_of_both_count():
    found, known = partition([0, 1, 0, 1]), {"c0": "x", "c1": "y", "late": "x"}
    assert adjusted_rand_index(found, known) == 1.0
    with pytest.raises(ValueError, match="no client has both"):
        adjusted_rand_index(found, {"late": "x"})


def test_with_ties_by_hand():
    found = agreement(PAIRS, ties=True)
    assert found.pairs == 3
    assert found.majority == pytest.approx(1 / 3)
    assert found.vote == pytest.approx((2 / 3 + 1 / 2 + 1 / 3 + 0) / 4)
    assert found.people == pytest.approx((1 / 3 + 0 + 1 / 3 + 1) / 4)
    assert (found.unread_pairs, found.no_verdict, found.no_vote, found.no_majority) == (1, 0, 0, 1)
    assert (found.votes, found.ties, found.several) == (11, 0, 4)


def test_without_ties_by_hand():
    found = agreement(PAIRS, ties=False)
    assert (found.pairs, found.majority) == (2, 1)
    assert found.vote == pytest.approx((2 / 3 + 1 / 2 + 1) / 3)
    assert found.people == pytest.approx((1 / 3 + 0 + 1) / 3)
    assert (found.unread_pairs, found.no_verdict, found.no_vote, found.no_majority) == (1, 1, 0, 1)
    assert (found.votes, found.ties, found.several) == (9, 2, 3)


def test_a_judge_that_guesses_agrees_by_chance_and_one_that_knows_always():
    stream = np.random.default_rng(1)
    votes, guesses = stream.choice([0, 0.5, 1], 1500).tolist(), stream.choice([0, 0.5, 1], 1500).tolist()
    guessed = [Judged([vote], guess, i) for i, (vote, guess) in enumerate(zip(votes, guesses, strict=True))]
    for ties, chance in ((True, 1 / 3), (False, 1 / 2)):
        found = agreement(guessed, ties)
        assert found.vote == found.majority == pytest.approx(chance, abs=0.05)
        assert found.majority_low < found.majority < found.majority_high < chance + 0.1
        assert math.isnan(found.people)
    assert agreement([Judged([vote] * 3, vote, "q") for vote in votes], ties=True)[:2] == (1500, 1)


def test_the_interval_is_over_questions():
    """A hundred pairs of two questions, one right throughout and one wrong: nothing is known of other questions."""
    pairs = [Judged([1], float(question == "a"), question) for question in "ab" for _ in range(50)]
    found = agreement(pairs, ties=True)
    assert (found.majority, found.majority_low, found.majority_high) == (0.5, 0, 1)


def test_a_majority_is_one_verdict_and_nothing_known_is_none():
    assert (majority([1, 1, 0.5]), majority([0]), majority([0.5, 0.5, 0, 1])) == (1, 0, 0.5)
    assert all(math.isnan(majority(votes)) for votes in ([], [1, 0], [0.5, 1], [1, 0, 0.5]))
    found = agreement([Judged([], 1, "q"), Judged([1], NAN, "q")], ties=True)
    assert (found.pairs, found.unread_pairs, found.no_vote, found.votes, found.several) == (0, 1, 1, 1, 0)
    assert all(math.isnan(value) for value in found[1:6])
