"""benchmarks/retrieval.py at a tiny size: its recall, its queries, and what it writes down."""

import numpy as np
import pytest

from fedlight.datamodules.vectors.vector_index import Hits


def hits(*rows):
    return Hits(np.array(rows), np.zeros(len(rows), np.float32))


def test_recall_and_made_up_vectors(benchmark):
    assert benchmark.recall([hits(1, 2), hits(3, 4)], [hits(2, 5), hits(4, 3)]) == 0.75
    vectors = benchmark.made_up(30_000, 128, seed=0)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    cosines = np.sort(vectors[:1] @ vectors[1:].T)[0]
    same_topic = cosines[-15:]  # 30 of 30,000 in a thousand topics
    assert abs(same_topic.mean() - 0.55) < 0.1
    assert abs(cosines[:-60].mean()) < 0.05
    queries = benchmark.queries_of(vectors, 20)
    assert np.median(np.sort(queries @ vectors.T, axis=1)[:, -10]) > 0.6


@pytest.mark.parametrize("given", ["sizes", "vectors"])
def test_rows(benchmark, measured, tmp_path, given):
    pytest.importorskip("hnswlib")
    vectors = benchmark.made_up(2000, 16, seed=3)
    np.save(tmp_path / "vectors.npy", vectors)
    data = ["--sizes", "2000"] if given == "sizes" else ["--vectors", str(tmp_path / "vectors.npy")]
    (row,) = measured(*data, "--dimension", "16", "--queries", "20", "--k", "5", "20")["rows"]
    assert (row["rows"], row["dimension"]) == (2000, 16)
    searches = [(one["k"], one["below"]) for one in row["searches"]]
    assert searches == [(5, None), (20, None), (5, 0.7), (20, 0.7)]
    assert all(one["recall"] > 0.95 for one in row["searches"])
    assert row["rss_peak_gib"] >= row["rss_built_gib"] >= row["rss_before_gib"] > 0
    assert list(tmp_path.glob("tmp*")) == []


def test_near_duplicates(benchmark):
    vectors = benchmark.made_up(10_000, 128, seed=0)
    before = vectors.copy()
    originals = benchmark.add_near_duplicates(vectors, 0.0204)  # 4 rows with 50 copies each
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert len(originals) == 4
    assert (vectors[originals] == before[originals]).all()
    cosines = vectors[originals] @ vectors.T
    assert ((cosines > 0.998).sum(axis=1) == 51).all()
    assert abs(np.sort(cosines, axis=1)[:, -51:-1].mean() - 0.999) < 5e-4
    assert (vectors != before).any(axis=1).sum() == 200


def test_efforts_until_a_target(measured):
    pytest.importorskip("hnswlib")
    sizes = ("--sizes", "3000", "--dimension", "32", "--queries", "20", "--k", "10")
    (row,) = measured(*sizes, "--near_duplicates", "0.02", "--target", "1")["rows"]
    assert {(one["k"], one["below"]) for one in row["efforts"]} == {(10, None), (10, 0.7)}
    for search in row["searches"]:  # the first effort is that of a search without a target
        first = next(one for one in row["efforts"] if one["below"] == search["below"])
        assert first["ef"] == 200
        assert first["recall"] >= search["recall"] - 1e-9  # of equal rows any counts
        assert 0 <= first["worst_query"] <= first["recall"] <= 1
        assert first["searched"] == ("hnsw" if first["recall"] == 1 else "exact")
