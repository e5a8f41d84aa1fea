from itertools import pairwise, product

import numpy as np
import pytest

from fedlight.federation.algorithms.assignments import em_step, nearest, optimal
from fedlight.federation.algorithms.fedbiscuit import greedy


def total(losses, groups):
    return losses[np.arange(len(groups)), groups].sum()


def best_of_all(losses):
    """The least sum over every balanced assignment, tried one by one."""
    clients, selectors = losses.shape
    sums = []
    for groups in product(range(selectors), repeat=clients):
        sizes = np.bincount(groups, minlength=selectors)
        if sizes.max() - sizes.min() <= 1:
            sums.append(total(losses, np.array(groups)))
    return min(sums)


@pytest.mark.parametrize("clients", [1, 2, 5, 6, 7, 8])
def test_optimal_is_the_best_of_all_balanced_assignments(clients):
    for seed in range(5):
        losses = np.random.default_rng(seed).random((clients, 3))
        groups = optimal(losses)
        assert total(losses, groups) == pytest.approx(best_of_all(losses))


@pytest.mark.parametrize("assign", [greedy, optimal])
@pytest.mark.parametrize(("clients", "selectors"), [(1, 3), (9, 3), (11, 3), (53, 5), (200, 7), (4, 1)])
def test_sizes_differ_by_at_most_one(assign, clients, selectors):
    losses = np.random.default_rng(clients).random((clients, selectors)) ** 4
    losses[:, 0] /= 10  # most want the first
    sizes = np.bincount(assign(losses), minlength=selectors)
    assert sizes.sum() == clients
    assert sizes.max() - sizes.min() <= 1


def test_greedy_by_hand_keeps_those_who_would_lose_most():
    # All five want selector 0, whose cap is 2: the last two lose 0.8 and 0.7 by moving and stay. Of the others two prefer
    # selector 2, whose cap is 2 as well, and the first is indifferent.
    losses = np.array([[0.1, 0.2, 0.2], [0.1, 0.4, 0.3], [0.1, 0.5, 0.2], [0.1, 0.9, 0.9], [0.1, 0.8, 0.8]])
    assert greedy(losses).tolist() == [1, 2, 2, 0, 0]
    assert greedy(1 - np.eye(3)).tolist() == [0, 1, 2]  # each has its best
    many = greedy(np.random.default_rng(0).random((10_000, 3)))  # within seconds
    assert sorted(np.bincount(many).tolist()) == [3333, 3333, 3334]


@pytest.mark.parametrize("assign", [greedy, optimal])
def test_the_order_of_the_clients_does_not_matter(assign):
    losses = np.random.default_rng(1).random((20, 3))
    order = np.random.default_rng(2).permutation(20)
    assert assign(losses)[order].tolist() == assign(losses[order]).tolist()


def test_nearest_is_the_least_of_all_assignments_and_knows_no_sizes():
    losses = np.random.default_rng(0).random((6, 3))
    losses[:, 1] -= 0.9
    every = [np.array(groups) for groups in product(range(3), repeat=6)]
    assert total(losses, nearest(losses)) == min(total(losses, groups) for groups in every)
    assert np.bincount(nearest(losses), minlength=3).max() >= 4


@pytest.mark.parametrize("assign", [greedy, optimal, nearest])
def test_a_loss_that_is_no_number_is_refused(assign):
    with pytest.raises(ValueError, match="client 1 under selector 0 is nan"):
        assign(np.array([[0.1, 0.2], [np.nan, 0.3]]))


def test_steps_of_expectation_maximization_find_the_weights_of_greatest_likelihood():
    """Each step raises the likelihood of the mixture; the limit is the best of a fine grid."""
    losses = np.random.default_rng(0).exponential(size=(40, 2))
    weights, likelihoods = np.array([0.5, 0.5]), []
    for _ in range(300):
        likelihoods.append(np.log((weights * np.exp(-losses)).sum(axis=1)).mean())
        weights = em_step(weights, losses)
        assert weights.sum() == pytest.approx(1)
    assert all(b >= a - 1e-12 for a, b in pairwise(likelihoods))
    grid = np.linspace(0, 1, 2001)
    of_grid = [np.log((np.array([w, 1 - w]) * np.exp(-losses)).sum(axis=1)).mean() for w in grid]
    assert 0.05 < grid[np.argmax(of_grid)] < 0.95
    assert weights[0] == pytest.approx(grid[np.argmax(of_grid)], abs=1e-3)


def test_a_step_of_expectation_maximization_holds_for_losses_of_any_size():
    far = em_step(np.array([0.25, 0.75]), np.array([[1e5, 1e5 + 1], [2.0, 2.0]]))
    one = 0.25 / (0.25 + 0.75 * np.exp(-1))
    assert far.tolist() == pytest.approx([(one + 0.25) / 2, 1 - (one + 0.25) / 2])
    # Selector 0 has weight 0 and is better by a thousand nats: both factors of the other likelihood underflow.
    found = em_step(np.array([0.0, 1.0]), np.array([[0.0, 1000.0], [3.0, 2.0]]))
    assert found.tolist() == [0.0, 1.0]
    tiny = em_step(np.array([1e-300, 1 - 1e-300]), np.array([[0.0, 1000.0]]))  # e^1000 is more than 1e300
    assert tiny.tolist() == pytest.approx([1.0, 0.0])
