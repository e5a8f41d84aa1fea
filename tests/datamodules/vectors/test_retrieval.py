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


@pytest.mark.parametrize(
    ("degrees", "number", "alpha", "rows"),
    [
        (12, 3, None, [1, 2, 0]),
        (0, 4, 1.0, [1, 2, 3, 4]),
        (45, 5, 0.75, [5, 0]),  # 45 degrees away; the next are 35 and cos 35 = 0.82
        (45, 5, -0.5, []),
    ],
)
def test_the_nearest_below_alpha_of_every_client_alike(index, degrees, number, alpha, rows):
    hits = retrieve(index, {"u": at(degrees)[0], "v": at(degrees)[0]}, number, alpha)
    found = [own.rows.tolist() for own in hits.values()]
    assert [sorted(own) for own in found] == [sorted(rows)] * 2  # two clients may have one row
    assert degrees == 45 or found[0] == rows  # there, two are equally near


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


@pytest.mark.parametrize(
    ("centers", "number", "alpha", "rows"),
    [
        ((0, 90), 3, None, [0, 5, 1]),  # the remainder goes to the first centres
        ((0, 1), 2, None, [0, 1]),  # near centres do not take a row twice
        ((0, 60, 90), 2, None, [0, 4]),  # fewer rows than centres
        # Below 0.6 to 45 degrees there is nothing, so the other centre gives all four that are below 0.6 to it.
        ((45, 180), 4, 0.6, [5, 4, 3, 2]),
    ],
)
def test_each_centre_gives_its_share(index, centers, number, alpha, rows):
    hits = retrieve_direct(index, at(*centers), number, alpha)
    assert hits.rows.tolist() == rows
    nearest = (PUBLIC[rows] @ at(*centers).T).max(axis=1)
    if alpha is None:
        np.testing.assert_allclose(hits.scores, nearest, atol=1e-6)


def test_all_rows_are_given_where_all_are_wanted(index):
    assert sorted(retrieve_direct(index, at(0, 1, 2), number=6).rows.tolist()) == [0, 1, 2, 3, 4, 5]
    assert len(retrieve_direct(index, at(45, 180), number=50, alpha=0.6).rows) == 6
