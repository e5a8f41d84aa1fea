import numpy as np
import pytest

from fedlight.datamodules.vectors import clusters as clusters_file
from fedlight.datamodules.vectors.clusters import assign_clusters, cluster

SPREAD = 0.05


def unit(vectors):
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def groups(sizes, dimension=8, seed=0):
    """Rows around one axis for each size, and whose group each is."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    rows = np.eye(dimension)[labels] + SPREAD * rng.normal(size=(len(labels), dimension))
    return unit(rows).astype(np.float32), labels


def test_centres_are_unit_means_and_the_largest_comes_first():
    vectors, labels = groups([5, 30, 12])
    found = cluster(vectors, num_clusters=3, seed=3)
    assert found.sizes.tolist() == [30, 12, 5]
    assert found.sizes.dtype == np.int64
    assert found.centers.dtype == np.float32
    for center, label in zip(found.centers, [1, 2, 0], strict=True):
        np.testing.assert_allclose(center, unit(vectors[labels == label].mean(axis=0)), atol=1e-6)


@pytest.mark.parametrize(("rows", "distinct"), [(1, 1), (3, 3), (9, 4)])
def test_fewer_distinct_vectors_than_clusters(rows, distinct):
    vectors = np.eye(4)[np.arange(rows) % distinct]
    found = cluster(vectors, num_clusters=10, seed=0)
    assert len(found.centers) == distinct
    assert found.sizes.sum() == rows
    assert {tuple(center) for center in found.centers.tolist()} == {tuple(row) for row in vectors.tolist()}


def test_vectors_that_differ_in_rounding_alone_are_no_warning():
    vectors = np.tile(unit(np.ones((1, 3))), (20, 1)).astype(np.float32)
    vectors[::2, 0] = np.nextafter(vectors[0, 0], np.float32(1))
    found = cluster(vectors, num_clusters=2, seed=0)
    assert found.sizes.sum() == 20
    assert (found.sizes > 0).all()


def test_opposite_members_have_a_centre_of_unit_length():
    found = cluster(np.array([[1.0, 0.0], [-1.0, 0.0]]), num_clusters=1, seed=0)
    assert found.centers.tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize(("vectors", "number"), [(np.eye(3), 0), (np.empty((0, 3)), 2), (np.ones(3), 2)])
def test_what_cannot_be_clustered_is_refused(vectors, number):
    with pytest.raises(ValueError, match="k-means needs"):
        cluster(vectors, number, seed=0)


@pytest.mark.parametrize("sizes", [[20, 30, 10, 40], [100, 150, 80]])
def test_pseudo_labels_are_the_groups_also_of_rows_that_are_not_fitted_to(sizes, monkeypatch):
    monkeypatch.setattr(clusters_file, "FITTED_ROWS", 110)
    vectors, labels = groups(sizes)
    found = assign_clusters(vectors, len(sizes), seed=1)
    assert found.shape == (sum(sizes),)
    assert len({*found.tolist()}) == len({*zip(found.tolist(), labels.tolist(), strict=True)}) == len(sizes)
    np.testing.assert_array_equal(found, assign_clusters(vectors, len(sizes), seed=1))
