"""Ways of augmentation on vectors: who gets what, on a circle where nearness can be seen."""

import numpy as np
import pytest
from coverage_ways import Server, around_all, around_one, fit_projector, send, ways

from fedlight.datamodules.vectors.clusters import Clusters
from fedlight.datamodules.vectors.vector_index import VectorIndex
from fedlight.evaluation.alignment import alignment, unit

DEGREES = np.array([0, 2, 180, 182, *range(10, 100, 10), *range(190, 280, 10)])  # the first four are private


def circle(degrees):
    angles = np.deg2rad(degrees)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


@pytest.fixture
def server():
    vectors, rows = circle(DEGREES), np.arange(4, len(DEGREES))
    clients = {"u": np.array([0, 1]), "v": np.array([2, 3])}
    sent = send(vectors, clients, clusters=1, seed=0)
    turned = {client: Clusters(-own.centers, own.sizes) for client, own in sent.items()}
    return Server(rows, VectorIndex.build(vectors[rows], "exact"), sent, {"turned": turned})


def degrees(given):
    return {client: sorted(DEGREES[rows].tolist()) for client, rows in given.items()}


def test_rows_around_centres_are_the_nearest_public_ones(server):
    one = around_one(server, server.sent, {"u": 0, "v": 0}, number=2, alpha=None)
    assert degrees(one) == {"u": [10, 20], "v": [190, 200]}
    assert degrees(around_all(server, 2, None)) == degrees(one)
    below = around_one(server, server.sent, {"u": 0, "v": 0}, number=2, alpha=0.7)  # cos 45 degrees and more
    assert degrees(below) == {"u": [50, 60], "v": [230, 240]}


def test_every_way_keeps_to_public_rows_and_to_its_number(server):
    inside = server.rows[:5]
    given = {name: way() for name, way in ways(server, inside, number=3, alpha=0.7, seed=0).items()}
    for name, of in given.items():
        assert of.keys() == {"u", "v"}
        for rows in of.values():
            assert len(rows) == len(np.unique(rows)) == (0 if name == "none" else 3)
            assert np.isin(rows, inside if name == "in domain at random" else server.rows).all()
    assert degrees(given["FedDCA"]) == {"u": [50, 60, 70], "v": [230, 240, 250]}
    assert degrees(given["FedDCA* (turned)"]) == {"u": [230, 240, 250], "v": [50, 60, 70]}
    assert degrees(given["FedDCA without alpha"]) == degrees(given["direct"])
    assert degrees(given["direct below alpha"]) == degrees(given["FedDCA"]) == degrees(given["largest"])


def test_draws_differ_by_client_and_by_seed(server):
    one, again, other = (ways(server, server.rows, 3, 0.7, seed)["random"]() for seed in (0, 0, 1))
    assert [one[client].tolist() for client in "uv"] == [again[client].tolist() for client in "uv"]
    assert one["u"].tolist() != one["v"].tolist()
    assert one["u"].tolist() != other["u"].tolist()


def test_the_projector_maps_held_out_vectors_and_is_a_function_of_the_seed():
    rng = np.random.default_rng(0)
    small = unit(rng.normal(size=(600, 6))).astype(np.float32)
    large = unit(np.tanh(3 * small @ rng.normal(size=(6, 8)))).astype(np.float32)
    one, same, other = (
        fit_projector(small[:500], large[:500], epochs=20, batch_size=50, lr=0.01, seed=seed).project(
            small[500:]
        )
        for seed in (0, 0, 1)
    )
    assert alignment(one, large[500:]).top1 > 0.8
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)
