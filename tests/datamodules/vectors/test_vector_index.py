import re

import numpy as np
import pytest

from fedlight.datamodules.vectors import vector_index as index_file
from fedlight.datamodules.vectors.retrieval import retrieve, retrieve_direct
from fedlight.datamodules.vectors.vector_index import VectorIndex, exact_search

ROWS, DIMENSION = 1500, 12


def unit(vectors):
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture(scope="module")
def vectors():
    rng = np.random.default_rng(0)
    topics = rng.normal(size=(20, DIMENSION))
    return unit(topics[rng.integers(20, size=ROWS)] + 0.6 * rng.normal(size=(ROWS, DIMENSION)))


@pytest.fixture(scope="module")
def queries(vectors):
    return unit(vectors[:7] + 0.2 * np.random.default_rng(1).normal(size=(7, DIMENSION)))


@pytest.fixture(scope="module")
def graph(vectors):
    pytest.importorskip("hnswlib")
    return VectorIndex.build(vectors, "hnsw")


def sorted_out(vectors, query, number, below=None):
    """All scores in one array, sorted."""
    scores = vectors.astype(float) @ query.astype(float)
    order = np.lexsort((np.arange(len(scores)), -scores))
    rows = [row for row in order if below is None or scores[row] < below][:number]
    return rows, scores[rows]


@pytest.mark.parametrize("below", [None, 0.7, 0.2, -2.0])
@pytest.mark.parametrize("number", [1, 10, 400, 5000])
def test_exact_search_is_a_sort(vectors, queries, number, below, monkeypatch):
    monkeypatch.setattr(index_file, "ROWS_AT_ONCE", 128)
    monkeypatch.setattr(index_file, "QUERIES_AT_ONCE", 3)
    for query, hits in zip(queries, exact_search(vectors, queries, number, below), strict=True):
        rows, scores = sorted_out(vectors, query, number, below)
        assert hits.rows.tolist() == rows
        np.testing.assert_allclose(hits.scores, scores, atol=1e-6)
        assert (hits.rows.dtype, hits.scores.dtype) == (np.int64, np.float32)


def test_equal_scores_come_in_the_order_of_their_rows_over_blocks(monkeypatch):
    monkeypatch.setattr(index_file, "ROWS_AT_ONCE", 4)
    vectors = np.tile(np.eye(2, dtype=np.float32), (9, 1))
    (hits,) = exact_search(vectors, np.array([[1, 0]], dtype=np.float32), number=5)
    assert hits.rows.tolist() == [0, 2, 4, 6, 8]


def test_scores_are_cosines_whatever_the_length_of_a_query(vectors, queries):
    index = VectorIndex.build(vectors)
    for one, other in zip(index.search(queries, 5), index.search(7.5 * queries, 5), strict=True):
        np.testing.assert_array_equal(one.rows, other.rows)
        np.testing.assert_allclose(one.scores, other.scores, atol=1e-6)


@pytest.mark.parametrize("below", [None, 0.9, 0.5])
@pytest.mark.parametrize("number", [1, 10, 100])
def test_the_graph_finds_what_exact_search_does(graph, vectors, queries, number, below):
    exact = exact_search(vectors, queries, number, below)
    found = graph.search(queries, number, below)
    shares = [np.isin(right.rows, hits.rows).mean() for right, hits in zip(exact, found, strict=True)]
    assert np.mean(shares) > 0.97
    for hits, query in zip(found, queries, strict=True):
        assert len(hits.rows) == number == len(set(hits.rows.tolist()))
        np.testing.assert_allclose(hits.scores, vectors[hits.rows] @ query, atol=1e-6)
        assert (np.diff(hits.scores) <= 0).all()
        assert below is None or (hits.scores < below).all()


def test_the_graph_is_asked_again_where_rows_are_above_the_bound(graph, vectors, queries, monkeypatch):
    """Above 0.5 there are some 60 rows to each query, so 30 neighbours are not enough."""
    asked, propose = [], VectorIndex._propose

    def noted(self, some, number):
        asked.append((len(some), number))
        return propose(self, some, number)

    monkeypatch.setattr(VectorIndex, "_propose", noted)
    monkeypatch.setattr(index_file, "exact_search", lambda _, queries, *rest: 1 / 0 if len(queries) else [])
    above = [(vectors @ query >= 0.5).sum() for query in queries]
    assert min(above) > 30
    found = graph.search(queries, 30, below=0.5)
    assert asked[0] == (7, 30)
    assert len(asked) > 1
    assert asked[-1][1] <= 30 + max(above)
    assert all(len(hits.rows) == 30 for hits in found)


def test_what_would_be_much_of_a_graph_is_searched_exactly(graph, vectors, queries):
    for number, below in [(ROWS, None), (ROWS // 3, None), (50, -0.5), (10, -2.0)]:
        right = exact_search(vectors, queries, number, below)
        for hits, expected in zip(graph.search(queries, number, below), right, strict=True):
            np.testing.assert_array_equal(hits.rows, expected.rows)


def test_many_equal_vectors_in_a_graph():
    pytest.importorskip("hnswlib")
    vectors = np.repeat(np.eye(3, dtype=np.float32), 800, axis=0)
    found = VectorIndex.build(vectors, "hnsw").search(np.eye(3, dtype=np.float32)[:1], 500)
    assert len(set(found[0].rows.tolist())) == 500
    assert (found[0].scores == 1).all()


def test_one_thread_builds_the_same_graph_each_time(vectors, tmp_path):
    pytest.importorskip("hnswlib")
    for name in ("one", "two"):
        VectorIndex.build(vectors[:300], "hnsw")._graph.save_index(str(tmp_path / name))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize(
    ("vectors", "complaint"),
    [
        (np.empty((0, 3)), "at least one row"),
        (np.ones(3), "shape (rows, dimension)"),
        (np.array([[1.0, 0.0], [1.0, 1.0]]), "vector 1 has length 1.414"),
        (np.array([[np.nan, 0.0]]), "vector 0 has length nan"),
    ],
)
def test_vectors_that_are_refused(vectors, complaint):
    with pytest.raises(ValueError, match=re.escape(complaint)):
        VectorIndex.build(vectors)


@pytest.mark.parametrize(
    ("queries", "number", "complaint"),
    [
        (np.ones((2, DIMENSION + 1)), 3, "do not fit an index of 12 dimensions"),
        (np.ones(DIMENSION), 3, "do not fit"),
        (np.zeros((1, DIMENSION)), 3, "length 0"),
        (np.ones((1, DIMENSION)), 0, "number=0"),
    ],
)
def test_searches_that_are_refused(vectors, queries, number, complaint):
    with pytest.raises(ValueError, match=complaint):
        VectorIndex.build(vectors).search(queries, number)


def test_auto_and_a_missing_hnswlib(vectors, monkeypatch, tmp_path):
    monkeypatch.setattr(index_file, "EXACT_BELOW", 100)
    monkeypatch.setattr(index_file, "find_spec", lambda name: None)
    assert VectorIndex.build(vectors[:99]).kind == "exact"
    with pytest.warns(UserWarning, match=r"100 rows are searched exactly.*fedlight\[hnsw\]"):
        assert VectorIndex.build(vectors[:100]).kind == "exact"
    with pytest.raises(ValueError, match=r"pip install 'fedlight\[hnsw\]'"):
        VectorIndex.build(vectors, "hnsw")


def test_auto_is_a_graph_from_some_size_on(vectors, monkeypatch):
    pytest.importorskip("hnswlib")
    monkeypatch.setattr(index_file, "EXACT_BELOW", 100)
    assert [VectorIndex.build(vectors[:size]).kind for size in (99, 100)] == ["exact", "hnsw"]


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
    hits = retrieve(index, {"u": at(0)[0], "v": at(90)[0], "w": at(0)[0]}, number=2, alpha=0.7)
    assert hits["u"].rows.tolist() == hits["w"].rows.tolist() == [3, 4]  # two clients may have one row
    np.testing.assert_allclose(hits["u"].scores, np.cos(np.deg2rad([50, 60])), atol=1e-6)
    assert hits["v"].rows.tolist() == [2, 1]  # 60 and 50 degrees have cosines of 0.87 and 0.77 to 90


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
