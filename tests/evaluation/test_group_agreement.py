import pytest

from fedlight.evaluation.group_agreement import adjusted_rand_index


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
