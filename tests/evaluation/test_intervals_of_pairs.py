import numpy as np

from fedlight.evaluation.bootstrap import bootstrap_interval
from fedlight.evaluation.win_rate import outcomes, win_tie_lose


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
