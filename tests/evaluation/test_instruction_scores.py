import numpy as np
import pytest

from fedlight.evaluation.instruction_scores import best, ifs, mean_losses, ppl
from fedlight.evaluation.tasks.model import Likelihood


def test_scores_by_hand():
    behind, alone = [0.5, 2.0, 3.0], [1.0, 1.0, 4.0]
    assert ifs(behind, alone).tolist() == [0.5, 2.0, 0.75]
    np.testing.assert_allclose(ppl(behind), [1.6487, 7.3891, 20.0855], rtol=1e-4)
    assert mean_losses([Likelihood(-3.0, 2, True), Likelihood(-1.0, 4, False)]).tolist() == [1.5, 0.25]


def test_the_lowest_ifs_is_the_prompt_that_helps_most_and_nothing_is_chosen_of_nothing():
    assert best(ifs([1.0, 3.0, 2.0], [2.0, 3.0, 1.0]), keep=1).tolist() == [0]
    assert best(ifs([1.0, 3.0, 2.0], [2.0, 3.0, 1.0]), keep=1, highest=True).tolist() == [2]
    assert best([], keep=3).tolist() == []
    assert best([1.0], keep=0).tolist() == []


def test_what_is_not_finite_never_wins():
    scores = ifs([1.0, 0.0, 1.0, np.nan, 1.0], [0.0, 0.0, 2.0, 1.0, 1.0])
    assert best(scores, keep=3).tolist() == [2, 4]
    assert best(scores, keep=3, highest=True).tolist() == [4, 2]
    assert best([np.nan, np.inf, -np.inf], keep=2).tolist() == []
    assert best(ppl([1e6, 1.0]), keep=1, highest=True).tolist() == [1]


@pytest.mark.parametrize("highest", [False, True])
def test_of_equal_scores_the_earlier_ones_win(highest):
    assert best([1.0, 1.0, 1.0, 1.0], keep=2, highest=highest).tolist() == [0, 1]
