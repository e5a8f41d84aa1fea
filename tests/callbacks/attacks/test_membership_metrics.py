import math
import random
from statistics import NormalDist
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torchmetrics.functional.classification import binary_auroc

from fedlight.callbacks.attacks.membership_inference import (
    MembershipInference,
    Trajectories,
    lira_scores,
    loss_ratios,
    membership_metrics,
    min_k_losses,
)
from fedlight.datamodules.text.templates import Template
from fedlight.evaluation.tasks.model import Likelihood


def drawn(shift, members=120, others=150, seed=0):
    draw = random.Random(seed)
    return (
        [round(draw.gauss(-shift, 1), 1) for _ in range(members)],  # rounded: some are tied
        [round(draw.gauss(0, 1), 1) for _ in range(others)],
    )


def best_rate(members, others, allowed):
    """By trying every threshold."""
    rates = [0.0]
    for threshold in {*members, *others}:
        if sum(other <= threshold for other in others) <= allowed * len(others):
            rates.append(sum(member <= threshold for member in members) / len(members))
    return max(rates)


@pytest.mark.parametrize("shift", [-0.5, 0.0, 0.5, 3.0])
def test_against_counting_and_torchmetrics(shift):
    members, others = drawn(shift)
    found = membership_metrics(members, others)
    pairs = [(member < other) + 0.5 * (member == other) for member in members for other in others]
    assert found["auc"] == pytest.approx(sum(pairs) / len(pairs))
    truth = torch.tensor([1] * len(members) + [0] * len(others))
    # torchmetrics takes scores as they are between 0 and 1.
    scores = torch.sigmoid(-torch.tensor([*members, *others], dtype=torch.float64))
    assert found["auc"] == pytest.approx(float(binary_auroc(scores, truth)), abs=1e-6)
    assert found["tpr_at_0.01_fpr"] == pytest.approx(best_rate(members, others, 0.01))
    assert found["tpr_at_0.1_fpr"] == pytest.approx(best_rate(members, others, 0.1))


def test_all_none_and_chance():
    perfect = membership_metrics([0.1, 0.2], [0.3, 0.4])
    assert perfect == {"auc": 1, "tpr_at_0.01_fpr": 1, "tpr_at_0.1_fpr": 1}
    assert membership_metrics([0.3, 0.4], [0.1, 0.2])["auc"] == 0
    assert membership_metrics([1.0] * 5, [1.0] * 7) == {"auc": 0.5, "tpr_at_0.01_fpr": 0, "tpr_at_0.1_fpr": 0}


def test_loss_ratios_by_hand():
    assert loss_ratios([1.0, 3.0], [2.0, 1.5]).tolist() == [0.5, 2.0]
    assert loss_ratios([0.0, 1.0], [1.0, 0.0]).tolist() == pytest.approx([1e-6, 1e6])
    assert loss_ratios([], []).tolist() == []


def test_min_k_against_numpy():
    draw = np.random.default_rng(0)
    texts = [(-draw.exponential(size=size)).tolist() for size in (1, 2, 4, 5, 6, 10, 11, 100)]
    numbers = [1, 1, 1, 1, 2, 2, 3, 20]
    expected = [-np.sort(text)[:number].mean() for text, number in zip(texts, numbers, strict=True)]
    assert min_k_losses(texts) == pytest.approx(expected, rel=1e-12)
    assert min_k_losses([[-0.5] * 3, [-0.5] * 2 + [-2.5] * 8]) == [0.5, 2.5]


def test_lira_against_the_logit_of_the_likelihood():
    draw = np.random.default_rng(0)
    losses, references = draw.exponential(size=(2, 50))
    logits = [np.log(np.exp(-loss) / (1 - np.exp(-loss))) for loss in (losses, references)]
    assert lira_scores(losses, references) == pytest.approx(logits[1] - logits[0], rel=1e-9)
    # Certain and hopeless texts have finite scores.
    certain, hopeless, equal = lira_scores([0.0, 900.0, 900.0], [900.0, 0.0, 900.0])
    assert certain == -hopeless == pytest.approx(-900 - math.log(1e6), abs=1e-5)
    assert equal == 0


def test_lira_orders_by_gaussian_likelihoods_of_one_variance():
    """Under the reference a text's logit is normal around its own reference: the tail is monotone in the score."""
    draw = np.random.default_rng(1)
    losses, references = draw.exponential(size=(2, 50))
    logits = [np.log(1 / np.expm1(loss)) for loss in (losses, references)]
    tails = [NormalDist(mean, 1.7).cdf(value) for value, mean in zip(*logits, strict=True)]
    assert np.argsort(lira_scores(losses, references)).tolist() == np.argsort(tails)[::-1].tolist()


def test_slopes_over_rounds_against_numpy():
    draw = np.random.default_rng(0)
    rounds, scores = [0, 2, 4, 7], draw.exponential(size=(4, 30))
    over_rounds = Trajectories()
    for number, values in zip(rounds, scores, strict=True):
        assert (over_rounds.scores() == {}) == (number < 4)
        over_rounds = Trajectories(over_rounds.sums)  # as from a checkpoint
        over_rounds.add(number, values.tolist())
    after = over_rounds.scores()
    assert after["rounds_mean"] == pytest.approx(scores.mean(axis=0), rel=1e-12)
    assert after["rounds_slope"] == pytest.approx(np.polyfit(rounds, scores, 1)[0], rel=1e-9)
    with pytest.raises(ValueError, match="has 3 rows, and had 30 in the rounds before: go on with the"):
        over_rounds.add(8, [1.0] * 3)


def test_what_cannot_be_judged():
    for losses in ([math.nan], [-1.0]):
        with pytest.raises(ValueError, match="negative or not a number"):
            loss_ratios(losses, [1.0])
        with pytest.raises(ValueError, match="negative or not a number"):
            lira_scores([1.0], losses)


def test_a_module_without_likelihoods_of_tokens_has_no_min_k():
    class Scores:
        def __init__(self, by_token):
            self.by_token = by_token

        def fits(self, prompts, new_tokens):
            return [True] * len(prompts)

        def log_likelihoods(self, prompts, continuations, raw):
            known = [2.0 if raw or "seen" not in prompt else 1.0 for prompt in prompts]
            return [[Likelihood(-2 * nats, 2, False, (-nats, -nats) * self.by_token)] for nats in known]

    seen, other = ({"instruction": text, "response": "yes"} for text in ("seen", "other"))
    data = SimpleNamespace(template=Template("{instruction}"), client_rows={"a": [seen]}, planted={})
    data.unseen_rows = lambda: [other]
    attack = MembershipInference()
    attack.prepare(data, None)
    with_tokens, without = (attack.attack(Scores(by_token), None).metrics for by_token in (True, False))
    min_k = {"min_k_auc": 1, "min_k_tpr_at_0.01_fpr": 1}
    assert with_tokens == {**without, **min_k}
    assert without["auc"] == without["lira_auc"] == without["loss_auc"] == 1
