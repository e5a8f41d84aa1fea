import numpy as np
import pytest

from fedlight.datamodules.vectors.retrieval import retrieve, retrieve_direct
from fedlight.datamodules.vectors.vector_index import VectorIndex

# of the public rows; cosines to 0 degrees: 1, .98, .94, .64, .5, 0
ANGLES = np.deg2rad([0, 10, 20, 50, 60, 90])
PUBLIC = np.stack([np.cos(ANGLES), np.sin(ANGLES)], axis=1).astype(np.float32)


def at(*degrees):
    angles = np.deg2rad(degrees)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


@pytest.fixture(scope="module")
def index():
    return VectorIndex.build(PUBLIC)


def test_rows_above_alpha_are_passed_over(index):
    hits = retrieve(index, {"u": at(0)[0], "v": at(90)[0]}, number=2, alpha=0.7)
    assert hits["u"].rows.tolist() == [3, 4]
    np.testing.assert_allclose(hits["u"].scores, np.cos(np.deg2rad([50, 60])), atol=1e-6)
    assert hits["v"].rows.tolist() == [2, 1]  # 60 and 50 degrees have cosines of 0.87 and 0.77 to 90


def test_without_alpha_the_nearest(index):
    assert retrieve(index, {"u": at(12)[0]}, number=3, alpha=None)["u"].rows.tolist() == [1, 2, 0]


def test_two_clients_may_have_one_row_and_none_has_one_twice(index):
    hits = retrieve(index, {"u": at(0)[0], "v": at(0)[0]}, number=4, alpha=1.0)
    assert hits["u"].rows.tolist() == hits["v"].rows.tolist() == [1, 2, 3, 4]


def test_fewer_where_fewer_are_below_alpha(index):
    hits = retrieve(index, {"u": at(45)[0]}, number=5, alpha=0.75)
    assert sorted(hits["u"].rows.tolist()) == [0, 5]  # 45 degrees away; the next are 35 and cos 35 = 0.82
    assert retrieve(index, {"u": at(45)[0]}, number=5, alpha=-0.5)["u"].rows.tolist() == []


def test_no_clients_and_centres_that_do_not_fit(index):
    assert retrieve(index, {}, number=3, alpha=0.7) == {}
    with pytest.raises(ValueError, match="do not fit an index of 2 dimensions"):
        retrieve(index, {"u": np.ones(3)}, number=3, alpha=0.7)
    with pytest.raises(ValueError, match="differ in shape"):
        retrieve(index, {"u": np.ones(2), "v": np.ones(3)}, number=3, alpha=0.7)


def written_out(public, centers, number):
    """Algorithm 2: each centre takes the top of what is left."""
    taken = []
    for center in centers:
        scores = public @ center
        order = [row for row in np.argsort(-scores, kind="stable").tolist() if row not in taken]
        taken += order[: number // len(centers)]
    return sorted(taken)


@pytest.mark.parametrize("number", [4, 20, 60])
def test_direct_retrieval_as_written_out(number):
    rng = np.random.default_rng(0)
    public, centers = rng.normal(size=(80, 5)), rng.normal(size=(4, 5))
    public, centers = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (public, centers))
    hits = retrieve_direct(VectorIndex.build(public), centers, number)
    assert sorted(hits.rows.tolist()) == written_out(public, centers, number)
    assert (np.diff(hits.scores) <= 0).all()


def test_the_remainder_goes_to_the_first_centres(index):
    hits = retrieve_direct(index, at(0, 90), number=3)
    assert hits.rows.tolist() == [0, 5, 1]
    np.testing.assert_allclose(hits.scores, [1, 1, np.cos(np.deg2rad(10))], atol=1e-6)


def test_near_centres_do_not_take_a_row_twice(index):
    assert sorted(retrieve_direct(index, at(0, 1, 2), number=6).rows.tolist()) == [0, 1, 2, 3, 4, 5]
    assert retrieve_direct(index, at(0, 1), number=2).rows.tolist() == [0, 1]


def test_what_a_centre_does_not_find_is_filled_by_the_others(index):
    """Below 0.6 to 45 degrees there is nothing, so the other centre gives all four that are below 0.6 to it."""
    hits = retrieve_direct(index, at(45, 180), number=4, alpha=0.6)
    assert hits.rows.tolist() == [5, 4, 3, 2]
    assert len(retrieve_direct(index, at(45, 180), number=50, alpha=0.6).rows) == 6


def test_fewer_rows_than_centres(index):
    assert retrieve_direct(index, at(0, 60, 90), number=2).rows.tolist() == [0, 4]
