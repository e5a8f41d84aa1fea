import numpy as np
import pytest

from fedlight.datamodules.vectors import vector_index as index_file
from fedlight.datamodules.vectors.vector_index import Hits, VectorIndex, in_words, query_recall, reach_recall

ROWS, DIMENSION, NUMBER = 3000, 16, 20


def unit(vectors):
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture(scope="module")
def vectors():
    """Sixty clusters, of whose rows one percent have five near-copies each."""
    rng = np.random.default_rng(0)
    topics = rng.normal(size=(60, DIMENSION))
    rows = unit(topics[rng.integers(60, size=ROWS)] + 0.5 * rng.normal(size=(ROWS, DIMENSION)))
    rows[-150:] = unit(rows[:30].repeat(5, axis=0) + 0.01 * rng.normal(size=(150, DIMENSION)))
    return rows


@pytest.fixture(scope="module")
def queries(vectors):
    """Means of four rows, and near-copies."""
    rng = np.random.default_rng(1)
    return unit(np.concatenate([vectors[rng.integers(ROWS, size=(40, 4))].mean(axis=1), vectors[:10]]))


@pytest.fixture
def poor(vectors, monkeypatch):
    """A graph of few links that starts at ef 20: it misses much."""
    pytest.importorskip("hnswlib")
    for name, value in {"MIN_EFFORT": 20, "SEARCH_EFFORT": 1, "LINKS": 6, "BUILD_EFFORT": 20}.items():
        monkeypatch.setattr(index_file, name, value)
    return VectorIndex.build(vectors, "hnsw")


def recalls(index, vectors, queries, number, below=None):
    """Share of the nearest rows by a full sort in fp64 that the index gives, of each query."""
    shares = []
    for query, hits in zip(queries, index.search(queries, number, below), strict=True):
        scores = vectors.astype(float) @ query.astype(float)
        order = [row for row in np.argsort(-scores) if below is None or scores[row] < below][:number]
        shares.append(len(set(order) & set(hits.rows.tolist())) / number)
    return np.array(shares)


def columns(found):
    """ef, mean recall and recall of the worst query of each search that was tried."""
    return [[tried[name] for tried in found["tried"]] for name in ("ef", "recall", "worst_query")]


@pytest.mark.parametrize("below", [None, 0.8])
def test_ef_is_doubled_until_the_recall_is_reached(poor, vectors, queries, below, monkeypatch):
    monkeypatch.setattr(index_file, "ROWS_PER_CANDIDATE", 0)
    before = recalls(poor, vectors, queries, NUMBER, below)
    assert before.mean() < 0.9  # otherwise the test says nothing
    found = reach_recall(poor, queries, NUMBER, below, target=0.99, seed=0)
    efforts, means, worsts = columns(found)
    assert means[0] == pytest.approx(before.mean(), abs=1e-12)
    assert worsts[0] == pytest.approx(before.min(), abs=1e-12)
    assert efforts == [20 * 2**step for step in range(len(efforts))]
    assert all(mean < 0.99 for mean in means[:-1])
    assert means[-1] >= 0.99
    assert found["searched"] == "hnsw"
    after = recalls(poor, vectors, queries, NUMBER, below)  # the index keeps the last effort
    assert after.mean() == pytest.approx(means[-1], abs=1e-12)
    assert found["queries"] == 50


def test_exact_search_replaces_a_graph_that_costs_more(poor, vectors, queries, monkeypatch):
    monkeypatch.setattr(index_file, "ROWS_PER_CANDIDATE", 20)  # 2 * 40 * 20 < 3000 <= 2 * 80 * 20
    found = reach_recall(poor, queries, NUMBER, None, target=1.0, seed=0)
    assert found["searched"] == "exact"
    assert columns(found)[0] == [20, 40, 80]
    assert columns(found)[1][-1] < 1
    assert recalls(poor.exact(), vectors, queries, NUMBER).min() == 1
    assert "below 1.0; searched exactly, which is cheaper than ef 160" in in_words(found, len(queries))


def test_a_sample_is_measured_and_drawn_by_the_seed(poor, vectors, queries, monkeypatch):
    monkeypatch.setattr(index_file, "SAMPLE", 7)
    one, again, other = (reach_recall(poor, queries, NUMBER, None, 0.0, seed) for seed in (0, 0, 1))
    assert one == again != other
    assert one["queries"] == 7
    shares = recalls(poor, vectors, queries, NUMBER)
    _, (mean,), (worst,) = columns(one)
    assert worst >= shares.min()
    assert round(mean * 7 * NUMBER) == pytest.approx(mean * 7 * NUMBER)


def test_a_repeated_measurement_starts_at_the_least_effort(poor, queries, monkeypatch):
    monkeypatch.setattr(index_file, "ROWS_PER_CANDIDATE", 0)
    one = reach_recall(poor, queries, NUMBER, None, 0.99, seed=0)
    assert len(one["tried"]) > 1
    assert reach_recall(poor, queries, NUMBER, None, 0.99, seed=0) == one


def test_equal_rows_are_equally_right():
    """Of three equal rows an approximate search may give any."""
    exact = [Hits(np.array([0, 1]), np.array([1.0, 0.5], dtype=np.float32))]
    found = [Hits(np.array([0, 2]), np.array([1.0, 0.5 - 3e-8], dtype=np.float32))]
    worse = [Hits(np.array([0, 3]), np.array([1.0, 0.4999], dtype=np.float32))]
    nothing = [Hits(np.array([], dtype=int), np.array([], dtype=np.float32))]
    assert query_recall(found, exact).tolist() == [1.0]
    assert query_recall(worse, exact).tolist() == [0.5]
    assert query_recall(nothing, exact).tolist() == [0.0]
    assert query_recall(nothing, nothing).tolist() == [1.0]


def test_an_exact_index_is_refused(vectors, queries):
    with pytest.raises(ValueError, match="nothing to measure"):
        reach_recall(VectorIndex.build(vectors), queries, NUMBER, None, 0.99, 0)
