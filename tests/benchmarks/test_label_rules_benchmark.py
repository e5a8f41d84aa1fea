"""Rules by which perfect selectors label: identities, the closed form for opposite tastes, the benchmark on few prompts."""

import json

import label_rules
import numpy as np
import pytest

from fedlight.toy.oracle import RULES, Oracle, margins
from fedlight.toy.votes import WorldOptions, population

THIRDS = np.full(3, 1 / 3)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def test_pooled_votes_are_the_sign_of_the_mean_probability():
    utilities = np.random.default_rng(0).normal(0, 2, (200, 3))
    shares = np.array([0.5, 0.3, 0.2])
    expected = sigmoid(utilities / 0.8) @ shares - 0.5
    assert np.sign(margins(utilities, shares, "pooled", 0.8)) == pytest.approx(np.sign(expected))
    assert margins(utilities, shares, "mean", 0.8) == pytest.approx(utilities @ shares)


def test_no_rule_agrees_with_more_people_than_their_majority():
    utilities = np.random.default_rng(1).normal(0, 2, (500, 3)) * [1, 0.2, 5]
    shares = np.array([0.45, 0.35, 0.2])
    labels = {rule: np.sign(margins(utilities, shares, rule, 0.8)) for rule in RULES}
    agree = {rule: (label[:, None] == np.sign(utilities)) @ shares for rule, label in labels.items()}
    assert all((agree["people"] >= agree[rule]).all() for rule in RULES)
    assert agree["pooled"].mean() < agree["people"].mean()


def test_one_taste_leaves_nothing_to_choose_and_ties_are_ties():
    one = np.random.default_rng(2).normal(0, 2, (100, 1))
    labels = [np.sign(margins(np.repeat(one, 3, axis=1), THIRDS, rule, 0.8)) for rule in RULES]
    assert all((label == labels[0]).all() for label in labels)
    """1/3 - 1/3 + 0 in floating point is not always 0."""
    shares = np.array([14, 13, 13]) / 40
    assert margins(np.array([[1.0, -1.0, 0.0]]), THIRDS, "groups", 1.0).tolist() == [0.0]
    assert margins(np.array([[0.0, 2.0, -2.0]]), shares, "people", 1.0).tolist() == [0.0]
    assert margins(np.array([[0.0, 2.0, -2.0]]), THIRDS, "pooled", 0.0).tolist() == [0.0]


@pytest.mark.parametrize("share", [0.2, 1 / 3, 0.45])
def test_when_pooled_votes_follow_the_minority(share):
    """At a loudness of a million the border is where the others prefer theirs with probability 1 / (2 - 2 share)."""
    border = 0.8 * np.log(1 / (1 - 2 * share))  # tanh(u / 2b) = s / (1 - s)
    assert sigmoid(border / 0.8) == pytest.approx(1 / (2 - 2 * share))
    for difference in (0.5 * border, 0.99 * border, 1.01 * border, 2 * border):
        for loud in (0.5, 1.0, 3.0, 1e6):
            utilities = np.array([[difference, -loud * difference]])
            follows = margins(utilities, np.array([1 - share, share]), "pooled", 0.8)[0] < 0
            assert follows == label_rules.pooled_follows_minority(share, loud, difference, 0.8)
            if loud <= 1:
                assert not follows
            if loud == 1e6:
                assert follows == (difference < border)


def test_a_reward_is_found_again_from_its_labels():
    rng = np.random.default_rng(3)
    truth, pairs = np.array([1.5, -2.0, 0.5]), rng.normal(0, 1, (20_000, 3))
    first_won = (rng.random(len(pairs)) < sigmoid(pairs @ truth)).astype(float)
    assert label_rules.fit_reward(pairs, first_won, ridge=0.0) == pytest.approx(truth, abs=0.1)


def test_a_world_of_one_taste_is_served_alike_by_all_rules():
    world = label_rules.World(np.ones((3, 1)) * [[1.0, -1.0, 0.5, 0.0, 0.0, 0.0]], THIRDS)
    labelled, evaluated = label_rules.draw(100, 4, 0), label_rules.draw(100, 9, 1)
    rows = label_rules.compare(world, labelled, evaluated)
    assert len({(row["by_people"], row["by_mean"], row["worst"]) for row in rows}) == 1
    assert rows[0]["by_people"] > 0.75
    assert [row["differ"] for row in rows] == [0] * 4


def test_the_oracle_labels_by_these_rules():
    """Three summaries against each other, in a world whose groups are loud and quiet and of unlike size."""
    oracle = Oracle(0, opposition=1.0, tastes="loud", shares="3-1-1")
    assert oracle.shares == pytest.approx({"thorough": 0.6, "warm": 0.2, "terse": 0.2})
    post = "anna bakes bread . ben reads maps ."
    texts = ["kindly anna bakes bread .", "duh anna bakes bread .", "anna bakes bread . ben reads maps ."]
    first, second = [texts[0], texts[0], texts[1]], [texts[1], texts[2], texts[2]]
    by_group = [
        [oracle.utility(post, a, group) - oracle.utility(post, b, group) for group in oracle.shares]
        for a, b in zip(first, second, strict=True)
    ]
    differences = np.array(by_group)
    shares = np.array([0.6, 0.2, 0.2])
    for rule in RULES:
        found = oracle.margins([post] * 3, first, second, rule)
        assert found == pytest.approx(margins(differences, shares, rule, 0.8))
    assert oracle.margins([post] * 3, first, second, "terse") == pytest.approx(differences[:, 2])
    with pytest.raises(ValueError, match="rule='median'"):
        oracle.margins([post], texts[:1], texts[1:2], "median")


def test_groups_have_the_sizes_that_they_are_given():
    sizes = [voter.group for voter in population(WorldOptions.parse(num_clients=50, shares="3-1-1"))]
    assert [sizes.count(group) for group in ("thorough", "warm", "terse")] == [30, 10, 10]
    for wrong in ("3-1", "3-1-0", "a-b-c", ""):
        with pytest.raises(ValueError, match=f"shares='{wrong}' must be 3 positive whole numbers"):
            WorldOptions.parse(shares=wrong)
    with pytest.raises(ValueError, match="tastes='loudly'"):
        WorldOptions.parse(tastes="loudly")


def test_the_benchmark_on_few_prompts(tmp_path, capsys):
    label_rules.main(["--prompts", "150", "--seeds", "0", "1", "--json", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert len(rows) == 2 * 6 * 4
    assert "by_people minus pooled's" in capsys.readouterr().out
    by = {(row["world"], row["method"], row["seed"]): row for row in rows}
    loud = [by["loud", rule, 0]["by_people"] for rule in ("pooled", "groups")]
    assert loud[1] > loud[0] + 0.1  # the quiet two thirds are outvoted by certainty
