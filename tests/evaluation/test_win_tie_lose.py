import math

import numpy as np
import pytest

from fedlight.evaluation.bootstrap import bootstrap_interval
from fedlight.evaluation.win_rate import outcomes, win_tie_lose

NAN = math.nan
# What is said with ours first and with ours second -> what both make together, and with in_both.
CASES = {
    (1, 1): ("win", "win"),
    (1, 0.5): ("win", "tie"),
    (0.5, 1): ("win", "tie"),
    **dict.fromkeys([(1, 0), (0, 1), (0.5, 0.5)], ("tie", "tie")),
    (0, 0.5): ("lose", "tie"),
    (0.5, 0): ("lose", "tie"),
    (0, 0): ("lose", "lose"),
}


@pytest.mark.parametrize("pair", CASES)
def test_each_pair_of_verdicts(pair):
    for outcome, in_both in zip(CASES[pair], (False, True), strict=True):
        found = win_tie_lose([pair[0]], [pair[1]], in_both=in_both)
        assert {name for name in ("win", "tie", "lose") if getattr(found, name)} == {outcome}
        assert found.wt == (outcome != "lose")
        assert found.order_changed == (pair[0] != pair[1])
        assert found.prefers_first == (pair[0] + 1 - pair[1]) / 2
        assert math.isnan(found.win_stderr)


def test_shares_and_errors_by_hand():
    first, second = [1, 1, 1, 0, 0.5], [1, 1, 0, 0, NAN]
    found = win_tie_lose(first, second)
    assert (found.pairs, found.unread) == (4, 1)
    assert (found.win, found.tie, found.lose, found.wt) == (0.5, 0.25, 0.25, 0.75)
    assert found.win_stderr == pytest.approx(math.sqrt((4 * 0.25) / 3 / 4))  # wins 1, 1, 0, 0
    assert found.wt_stderr == pytest.approx(math.sqrt((3 * 0.0625 + 0.5625) / 3 / 4))  # 1, 1, 1, 0
    assert found.order_changed == 0.25
    assert found.prefers_first == (0.5 + 0.5 + 1.0 + 0.5) / 4


def test_nothing_read_is_nothing_known():
    found = win_tie_lose([NAN, 1], [1, NAN])
    assert (found.pairs, found.unread) == (0, 2)
    assert math.isnan(found.win)
    assert math.isnan(found.wt)


def test_pairs_of_one_prompt_are_one_draw():
    """Three clients say the same to two prompts: the error is that of two prompts, not of six pairs."""
    verdicts, prompts = [1, 1, 1, 0, 0, 0], [7, 7, 7, 3, 3, 3]
    found = win_tie_lose(verdicts, verdicts, prompts=prompts)
    assert found.win == 0.5
    assert found.win_stderr == pytest.approx(win_tie_lose([1, 0], [1, 0]).win_stderr)
    assert win_tie_lose(verdicts, verdicts).win_stderr < found.win_stderr


def test_what_does_not_fit_together_is_refused():
    for first, second in (([], []), ([1], [1, 0])):
        with pytest.raises(ValueError, match=f"got {len(first)} and {len(second)} verdicts"):
            win_tie_lose(first, second)
    with pytest.raises(ValueError, match="has 2 pairs, but 1 prompts"):
        win_tie_lose([1, 1], [1, 1], prompts=[0])


def test_it_is_that_of_the_prompts_and_of_the_seed() -> None:
    stream = np.random.default_rng(4)
    own = [np.repeat(stream.integers(0, 2), stream.integers(1, 9)).astype(float) for _ in range(40)]
    first = np.concatenate(own)  # the same verdict on all answers to a prompt
    prompts = np.repeat(np.arange(40), [len(verdicts) for verdicts in own]).tolist()
    seen = []
    for seed in (0, 3):
        found = win_tie_lose(first, first, prompts=prompts, seed=seed)
        seen.append((found.win_rate_low, found.win_rate_high))
        assert seen[-1] == bootstrap_interval(outcomes(first, first), prompts, seed=seed)
    assert seen[0] != seen[1]
    of_pairs = win_tie_lose(first, first)
    assert of_pairs.win_rate_high - of_pairs.win_rate_low < 0.6 * (seen[0][1] - seen[0][0])
