import math

import numpy as np
import pytest

from fedlight.datamodules.preferences import baselines as rules


def rows_of(client, *pairs):
    """Return rows of a client that prefers the first of each pair; every second row has it as B."""
    rows = []
    for number, (liked, disliked) in enumerate(pairs):
        a, b, choice = (liked, disliked, "a") if number % 2 == 0 else (disliked, liked, "b")
        rows.append({"client": client, "response_a": a, "response_b": b, "choice": choice})
    return rows


def with_jury(rows, likes):
    return [row | {f"jury_{side}": likes[row[f"response_{side}"]] for side in "ab"} for row in rows]


def test_strengths_of_three_statements_by_hand():
    """Strengths log 4, log 2 and 0 give odds of 2 : 1, 2 : 1 and 4 : 1, which these counts have exactly."""
    wins = np.array([[0, 2, 4], [1, 0, 2], [1, 1, 0]])
    strengths = rules.bradley_terry(wins, penalty=0)
    assert np.diff(strengths) == pytest.approx([-math.log(2), -math.log(2)], abs=1e-6)


def test_strengths_with_a_penalty_by_hand():
    """Strengths s and -s minimize log(1 + exp(-2 s)) + 2 penalty s^2 where 1 / (1 + exp(2 s)) = 2 penalty s: 2 s = log 3."""
    strengths = rules.bradley_terry(np.array([[0, 7], [0, 0]]), penalty=1 / (4 * math.log(3)))
    assert strengths == pytest.approx([math.log(3) / 2, -math.log(3) / 2], abs=1e-6)


def test_each_rule_by_hand():
    """Two camps contradict each other on tea and coffee; all of them prefer a nap to noise."""
    tea, coffee, nap, noise = "more tea", "coffee", "a long nap", "noise"
    train = []
    for camp, (liked, disliked) in {"t": (tea, coffee), "c": (coffee, tea)}.items():
        for person in range(2 if camp == "t" else 1):
            train += rows_of(f"{camp}{person}", *[(liked, disliked), (nap, noise)] * 3)
    likes = {tea: 0.25, coffee: 0.75, nap: 0.5, noise: 0.5}
    test = rows_of("t0", (tea, coffee), (nap, noise)) + rows_of("c0", (coffee, tea), (nap, noise))
    test += rows_of("new", (tea, "cocoa!!!"))
    found = rules.rule_accuracies(train, with_jury(test, likes | {"cocoa!!!": 0.25}))
    assert list(found) == [rules.NOTHING, rules.LONGER, rules.JURY, rules.STRENGTHS, rules.FACTORS]
    assert found[rules.NOTHING] == {"c0": 0.5, "new": 0.5, "t0": 0.5}
    # tea and cocoa have 8 characters, coffee 6; tea has won 6 of 9, cocoa was never seen
    assert found[rules.LONGER] == {"c0": 0.5, "new": 0.5, "t0": 1.0}
    assert found[rules.JURY] == {"c0": 0.75, "new": 0.5, "t0": 0.25}  # nap and noise are tied
    assert found[rules.STRENGTHS] == {"c0": 0.5, "new": 1.0, "t0": 1.0}
    assert found[rules.FACTORS] == {"c0": 1.0, "new": 1.0, "t0": 1.0}


def test_accuracies_do_not_depend_on_the_order_of_rows():
    rng = np.random.default_rng(1)
    draws = [rng.integers(0, 9, size=(30, 2)).astype(str).tolist() for _ in range(4)]
    train = [row for n, pairs in enumerate(draws) for row in rows_of(f"p{n}", *pairs)]
    likes = {str(n): n / 9 for n in range(9)}
    test = with_jury([row for n, pairs in enumerate(draws) for row in rows_of(f"p{n}", *pairs[:9])], likes)
    mixed = [[rows[i] for i in rng.permutation(len(rows))] for rows in (train, test)]
    found, of_mixed = rules.rule_accuracies(train, test), rules.rule_accuracies(*mixed)
    for rule, of_clients in found.items():
        assert of_mixed[rule] == pytest.approx(of_clients)
