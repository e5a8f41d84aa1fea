import math

import numpy as np
import pytest
from scipy.optimize import minimize

from fedlight.evaluation.equal_length import (
    PENALTY_C,
    Compared,
    EqualLength,
    _difficulties,
    _Pairs,
    rates_at_equal_length,
)


def sigmoid(logits):
    return 1 / (1 + np.exp(-logits))


def judged(stream, quality, bias, hardness, hard, mean_longer=80.0):
    """Verdicts of a judge that likes length on answers that are longer by 80 +- 100 characters; and the truth."""
    longer = mean_longer + 100 * stream.standard_normal(len(hardness))
    wins = sigmoid(quality + hardness + bias * np.tanh(longer / longer.std()))
    if hard:
        wins = (stream.random(len(wins)) < wins).astype(float)
    return Compared(wins, longer, range(len(wins))), float(sigmoid(quality + hardness).mean())


@pytest.mark.parametrize("hard", [True, False], ids=["hard", "soft"])
@pytest.mark.parametrize("quality", [-1.0, 0.0, 0.7])
@pytest.mark.parametrize("bias", [-1.5, 1.0, 3.0])
def test_the_truth_comes_out_where_the_raw_rate_is_off_by_far(quality, bias, hard):
    stream = np.random.default_rng(5)
    compared, truth = judged(stream, quality, bias, np.zeros(20_000 if hard else 500), hard)
    found = rates_at_equal_length({"ours": compared})["ours"]
    assert abs(found.corrected - truth) < 0.02
    assert found.length_effect == pytest.approx(bias, abs=0.15)
    assert (found.raw - truth) * np.sign(bias) > 0.05


@pytest.mark.parametrize("hard", [True, False], ids=["hard", "soft"])
def test_several_methods_on_prompts_of_different_hardness(hard):
    stream = np.random.default_rng(6)
    hardness = 1.5 * stream.standard_normal(10_000 if hard else 400)
    qualities = {"worse": -1.0, "better": 1.0}
    worlds = {name: judged(stream, quality, 1.5, hardness, hard) for name, quality in qualities.items()}
    found = rates_at_equal_length({name: compared for name, (compared, _) in worlds.items()})
    for name, (_, truth) in worlds.items():
        assert abs(found[name].corrected - truth) < 0.02, name
        assert found[name].raw - truth > 0.05, name
    assert list(found) == list(worlds)


def test_methods_tell_how_hard_prompts_are():
    """All write more where it is easy: alone, that looks like a taste for length; the others' verdicts tell it apart."""
    stream = np.random.default_rng(7)
    hardness = 1.5 * stream.standard_normal(600)
    longer = 100 * (hardness + 0.5)
    worlds = {index: judged(stream, 0.5, 1.5, hardness, False, mean_longer=longer) for index in range(6)}
    together = rates_at_equal_length({index: compared for index, (compared, _) in worlds.items()})
    for index, (compared, truth) in worlds.items():
        alone = rates_at_equal_length({index: compared})[index].corrected
        assert abs(together[index].corrected - truth) < 0.6 * abs(alone - truth)


def test_the_fit_is_the_minimum_of_the_penalised_loss():
    stream = np.random.default_rng(8)
    compared, _ = judged(stream, 0.4, 2.0, stream.standard_normal(40), False)
    length = np.tanh(np.array(compared.longer) / np.std(compared.longer))
    wins = np.array(compared.wins)

    def loss(weights):
        logits = weights[0] + weights[1] * length
        return (np.logaddexp(0, logits) - wins * logits).sum() + weights[1] ** 2 / (2 * PENALTY_C)

    intercept, phi = minimize(loss, np.zeros(2), tol=1e-10).x
    found = rates_at_equal_length({"ours": compared})["ours"]
    assert found.length_effect == pytest.approx(phi, abs=1e-4)
    assert found.corrected == pytest.approx(sigmoid(intercept), abs=1e-4)


def test_where_there_is_nothing_to_correct():
    longer = np.arange(20.0)
    assert rates_at_equal_length({"m": Compared([1] * 20, longer, range(20))})["m"] == EqualLength(1, 1, 0)
    assert rates_at_equal_length({"m": Compared([0] * 20, longer, range(20))})["m"] == EqualLength(0, 0, 0)
    same = rates_at_equal_length({"m": Compared([1, 0, 0, 0.5] * 5, [0.0] * 20, range(20))})["m"]
    assert same == EqualLength(0.375, 0.375, 0)
    ties = rates_at_equal_length({"m": Compared([0.5] * 20, longer, range(20))})["m"]
    assert ties.corrected == pytest.approx(0.5)
    assert ties.length_effect == pytest.approx(0, abs=1e-6)


def test_few_prompts_and_unread_verdicts():
    one = rates_at_equal_length({"m": Compared([1.0], [5.0], ["x"])})["m"]
    assert one.raw == 1
    assert math.isnan(one.corrected)
    clients = Compared([1, 0] * 9, [5.0, -3.0] * 9, sorted(list(range(9)) * 2))  # 18 answers, 9 prompts
    assert math.isnan(rates_at_equal_length({"m": clients})["m"].corrected)
    unread = Compared([math.nan] * 20, [1.0] * 20, range(20))
    nothing = rates_at_equal_length({"m": unread, "n": clients})["m"]
    assert math.isnan(nothing.raw)
    assert math.isnan(nothing.corrected)
    stream = np.random.default_rng(11)
    compared, _ = judged(stream, 0.4, 2.0, np.zeros(60), True)
    wins, longer, prompts = ([*part] for part in compared)
    more = Compared([math.nan, *wins], [1e6, *longer], [-1, *prompts])
    alone = rates_at_equal_length({"m": compared})["m"]
    assert rates_at_equal_length({"m": more, "unread": unread})["m"] == alone


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="m has 2 verdicts, 1 lengths and 2 prompts"):
        rates_at_equal_length({"m": Compared([1, 0], [1.0], "ab")})
    with pytest.raises(ValueError, match=r"m has verdicts from 0\.0 to 2\.0: they lie in \[0, 1\]"):
        rates_at_equal_length({"m": Compared([0, 2], [1.0, 1.0], "ab")})


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
