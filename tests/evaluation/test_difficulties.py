import numpy as np
import pytest

from fedlight.evaluation.equal_length import Compared, _difficulties, _Pairs

EASY = np.repeat([1.0, -1.0], 50)  # in log odds


def found(*methods: tuple[np.ndarray, np.ndarray, np.ndarray]) -> np.ndarray:
    """The difficulties that come out of log odds, lengths and prompts of each method, by prompt."""
    pairs = [
        _Pairs("other", Compared(1 / (1 + np.exp(-odds)), longer, prompts.tolist()))
        for odds, longer, prompts in methods
    ]
    by_prompt = _difficulties(pairs)
    return np.array([by_prompt[prompt] for prompt in sorted(by_prompt)])


def test_easy_prompts_are_told_from_hard_ones() -> None:
    gamma = found(*[(EASY, np.zeros(100), np.arange(100))] * 4)
    assert gamma[:50].min() > 0.4
    assert gamma[50:].max() < -0.4


def test_how_long_the_answers_were_does_not_make_a_prompt_easy() -> None:
    """All methods write more for the first prompts, and the judge goes by length alone."""
    longer = np.where(EASY > 0, 300.0, -100.0) + np.random.default_rng(1).normal(0, 100, 100)
    odds = 2 * np.tanh(longer / longer.std())
    gamma = found(*[(odds, longer, np.arange(100))] * 4)
    assert abs(gamma[:50].mean() - gamma[50:].mean()) < 0.4  # else it is 1.4


def test_who_answered_does_not_make_a_prompt_easy() -> None:
    """A strong method has answered the first prompts, a weak one the others."""
    first, second = np.arange(50), np.arange(50, 100)
    none = np.zeros(50)
    gamma = found((none + 2, none, first), (none - 2, none, second))
    assert gamma[:50].mean() == pytest.approx(-gamma[50:].mean(), abs=1e-3)
    assert gamma[:50].mean() < 0.2  # else it is 0.5
