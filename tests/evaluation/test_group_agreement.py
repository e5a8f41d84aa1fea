"""Agreement of two partitions, by hand and against scikit-learn."""

from itertools import permutations

import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score

from fedlight.evaluation.group_agreement import adjusted_rand_index, share_with_their_group


def partition(numbers):
    return {f"c{i}": int(number) for i, number in enumerate(numbers)}


def test_names_of_groups_are_without_meaning():
    found, known = partition([0, 0, 1, 2, 2]), {f"c{i}": name for i, name in enumerate("yyxzz")}
    assert adjusted_rand_index(found, known) == share_with_their_group(found, known) == 1.0


@pytest.mark.parametrize("seed", range(8))
def test_against_scikit_learn_and_all_matchings(seed):
    rng = np.random.default_rng(seed)
    found, known = rng.integers(0, 3, 20), rng.integers(0, 4, 20)
    if seed % 2:  # mostly alike
        found = np.where(rng.random(20) < 0.8, known % 3, found)
    ours = adjusted_rand_index(partition(found), partition(known))
    assert ours == pytest.approx(adjusted_rand_score(known, found), abs=1e-12)
    best = max((np.array(names)[found] == known).mean() for names in permutations(range(4), 3))
    assert share_with_their_group(partition(found), partition(known)) == pytest.approx(best)


def test_partitions_without_pairs_to_tell_apart():
    assert adjusted_rand_index(partition([0, 0, 0]), partition([1, 1, 1])) == 1.0
    assert adjusted_rand_index(partition([0, 1, 2]), partition([2, 1, 0])) == 1.0
    assert adjusted_rand_index(partition([0]), partition([0])) == 1.0
    assert adjusted_rand_index(partition([0, 0, 0]), partition([0, 1, 2])) == 0.0


def test_only_clients_of_both_count():
    found, known = partition([0, 1, 0, 1]), {"c0": "x", "c1": "y", "late": "x"}
    assert adjusted_rand_index(found, known) == share_with_their_group(found, known) == 1.0
    with pytest.raises(ValueError, match="no client has both"):
        adjusted_rand_index(found, {"late": "x"})
