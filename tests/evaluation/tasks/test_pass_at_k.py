from itertools import combinations
from statistics import fmean

import pytest

from fedlight.evaluation.tasks.human_eval import pass_at_k


@pytest.mark.parametrize("samples", [1, 4, 7])
def test_it_is_the_share_of_draws_with_a_right_sample(samples: int) -> None:
    for correct in range(samples + 1):
        outcomes = [True] * correct + [False] * (samples - correct)
        for k in range(1, samples + 1):
            drawn = fmean(any(draw) for draw in combinations(outcomes, k))
            assert pass_at_k(samples, correct, k) == pytest.approx(drawn, abs=1e-12)


def test_many_samples_do_not_overflow() -> None:
    assert pass_at_k(2000, 1000, 1) == 0.5
    assert pass_at_k(2000, 0, 100) == 0.0
    assert pass_at_k(2000, 1950, 100) == 1.0
