import pytest

from fedlight.toy.oracle import Oracle

POST = "anna bakes bread . ben reads maps . carla keeps bees . dan fixes clocks ."


def test_better_summaries_are_worth_more() -> None:
    oracle = Oracle()
    ladder = [
        *("", "ugh anna bakes pies . basically ben reads poems .", "anna bakes pies . ben reads maps ."),
        *("anna bakes bread . basically ben reads maps .", "anna bakes bread . ben reads maps ."),
        "kindly anna bakes bread . ben reads maps .",
    ]
    values = [oracle.utility(POST, text) for text in ladder[1:]]
    assert values == sorted(values)
    assert oracle.utility(POST, ladder[0]) < values[2]


def test_text_that_says_nothing_is_low_but_graded() -> None:
    oracle = Oracle()
    values = [oracle.utility(POST, text) for text in ("anna bread", "anna bread anna bread", "x " * 20)]
    assert values == sorted(values, reverse=True)
    assert values[0] < oracle.utility(POST, "anna bakes bread .")


def test_no_group_means_the_mean_over_clients() -> None:
    """With one client of each group the mean of the three groups' utilities is that over all clients."""
    oracle = Oracle(num_clients=3, opposition=1.0)
    text = "kindly anna bakes bread ."
    groups = [oracle.utility(POST, text, group) for group in ("thorough", "warm", "terse")]
    assert oracle.utility(POST, text) == pytest.approx(sum(groups) / 3)
    assert max(groups) - min(groups) > 1


def test_accuracy_by_hand() -> None:
    """Right, wrong, a draw of equal texts (one half) and a tie left out: (1 + 0 + 0.5) / 3."""
    good, bad = "kindly anna bakes bread .", "ugh anna bakes pies ."
    row = {"prompt": POST, "response_a": good, "response_b": bad, "client": "c000", "group": "warm"}
    votes = [row | {"choice": choice} for choice in ("a", "b", "tie")]
    votes.append(row | {"response_b": good, "choice": "a"})
    assert Oracle().accuracy(votes) == Oracle().accuracy(votes, personal=True) == 0.5


def test_bad_requests_are_named() -> None:
    with pytest.raises(ValueError, match="group='cold' has no clients: choose one of"):
        Oracle().utility(POST, "", group="cold")
    with pytest.raises(ValueError, match="no choice but ties"):
        Oracle().accuracy([])
