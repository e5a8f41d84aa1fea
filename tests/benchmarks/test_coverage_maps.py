"""From vectors to a trained projector and the maps that it is compared with."""

import numpy as np
import pytest
from coverage_ways import fit_projector, least_squares_map, maps

from fedlight.evaluation.alignment import alignment, unit


@pytest.fixture(scope="module")
def pairs():
    rng = np.random.default_rng(0)
    small = unit(rng.normal(size=(600, 6)))
    large = unit(np.tanh(3 * small @ rng.normal(size=(6, 8))))
    return small.astype(np.float32), large.astype(np.float32)


def test_all_three_map_held_out_vectors(pairs):
    train, held_out = ([side[part] for side in pairs] for part in (slice(0, 500), slice(500, 600)))
    found = {
        name: alignment(project(held_out[0]), held_out[1])
        for name, project in maps(*train, epochs=20, batch_size=50, lr=0.01).items()
    }
    assert list(found) == ["trained", "untrained", "least squares"]
    assert found["untrained"].top1 < 0.2 < 0.8 < min(found["trained"].top1, found["least squares"].top1)


def test_it_is_a_function_of_the_seed(pairs):
    one, same, other = (
        fit_projector(*pairs, epochs=1, batch_size=100, seed=seed).project(pairs[0][:3]) for seed in (0, 0, 1)
    )
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


def test_the_least_squares_map_finds_the_map_that_was_used():
    rng = np.random.default_rng(1)
    small, weights = rng.normal(size=(50, 4)), rng.normal(size=(5, 6))
    large = np.c_[small, np.ones(50)] @ weights
    np.testing.assert_allclose(least_squares_map(small, large), weights, atol=1e-10)
    small, large = small.astype(np.float32), large.astype(np.float32)
    np.testing.assert_allclose(maps(small, large, epochs=1)["least squares"](small), unit(large), atol=1e-5)
