"""Approximate against exact retrieval among many public instructions: recall, speed, build time and memory.

The graph is hnswlib's (Malkov and Yashunin, IEEE TPAMI 2020, https://arxiv.org/abs/1603.09320), as FedDCA retrieves with it
(https://arxiv.org/abs/2409.20135). Without --vectors the vectors are made up: a thousand topics, each vector of unit length
and of a cosine of about 0.5 to others of its topic and 0 to the rest. Queries are like clients' centres: unit means of ten
vectors of a topic. Real embeddings have fewer effective dimensions and are found more easily: --vectors FILE.npy takes some,
and queries are then means of ten neighbours.

* build: seconds until the graph can be searched, on one thread, which builds the same graph each time.
* recall@k: share of the k exact nearest that the graph gives too. below 0.7: of those with a cosine below 0.7 only.
* queries/s: of all queries in one call, one thread.
* RSS: largest resident memory of the process until then; it holds the vectors, and the graph its copy of them.

Each size runs in a separate process.

With --near_duplicates 0.01 one row in a hundred is a near-copy (cosine about 0.999) of one of few rows, each copied 50
times, as templates do to real instructions; a tenth of the queries are copied rows then. With --target 0.99 the search
effort is raised as a run raises it (`reach_recall`): a third table has the recall, the worst query's and the speed of each
effort beside exact search.

Run: OMP_NUM_THREADS=1 python benchmarks/retrieval.py [--sizes 10000 100000 1000000] [--vectors FILE.npy] [--json FILE]
     OMP_NUM_THREADS=1 python benchmarks/retrieval.py --sizes 1000000 --near_duplicates 0.01 --target 0.99 --k 10 100 1000
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from shown_rows import show

from fedlight.datamodules.vectors.vector_index import VectorIndex, reach_recall

TOPICS = 1000
MEMBERS = 10
ALPHA = 0.7
BLOCK = 10_000
COPIES = 50
COPY_NOISE = 0.045  # a cosine of 1 / sqrt(1 + 0.045^2) = 0.999


def unit(vectors: np.ndarray) -> np.ndarray:
    """Rows of unit length, float32."""
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def made_up(rows: int, dimension: int, seed: int) -> np.ndarray:
    """Clustered unit vectors ``(rows, dimension)``, made block by block."""
    topics = unit(np.random.default_rng(0).normal(size=(TOPICS, dimension)))
    vectors = np.empty((rows, dimension), dtype=np.float32)
    rng = np.random.default_rng([seed, 1])
    for start in range(0, rows, BLOCK):
        size = min(BLOCK, rows - start)
        noise = unit(rng.standard_normal((size, dimension), dtype=np.float32))
        vectors[start : start + size] = unit(topics[rng.integers(TOPICS, size=size)] + noise)
    return vectors


def add_near_duplicates(vectors: np.ndarray, share: float) -> np.ndarray:
    """Turns a share of the rows, drawn at random, into near-copies of one in fifty of them; gives the copied rows."""
    rng = np.random.default_rng(3)
    copies = rng.choice(len(vectors), round(share * len(vectors)), replace=False)
    originals, copies = np.split(copies, [-(-len(copies) // (COPIES + 1))])
    for start in range(0, len(copies), BLOCK):
        some = copies[start : start + BLOCK]
        of = originals[np.arange(start, start + len(some)) % len(originals)]
        noise = unit(rng.standard_normal((len(some), vectors.shape[1]), dtype=np.float32))
        vectors[some] = unit(vectors[of] + COPY_NOISE * noise)
    return originals


def queries_of(vectors: np.ndarray, number: int) -> np.ndarray:
    """Means of ten neighbours of some rows, ``(number, dimension)``; they are looked for among 10,000 rows."""
    rng = np.random.default_rng(2)
    some = vectors[np.sort(rng.choice(len(vectors), min(len(vectors), BLOCK), replace=False))]
    hits = VectorIndex.build(some, "exact").search(some[rng.choice(len(some), number)], MEMBERS)
    return unit(np.stack([some[each.rows].mean(axis=0) for each in hits]))


def recall(found: Sequence[Any], exact: Sequence[Any]) -> float:
    """Mean share of the exact hits that were found."""
    shares = [
        len(np.intersect1d(one.rows, other.rows)) / len(other.rows)
        for one, other in zip(found, exact, strict=True)
    ]
    return float(np.mean(shares))


def efforts(index: VectorIndex, queries: np.ndarray, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Recall and speed at each search effort that a run would try, for each k, without and with the bound."""
    rows = []
    exact = index.exact()
    for number, below in [(k, None) for k in options.k] + [(k, ALPHA) for k in options.k]:
        slow, _ = seconds(lambda: exact.search(queries, number, below))  # noqa: B023
        measured, found = seconds(lambda: reach_recall(index, queries, number, below, options.target, seed=0))  # noqa: B023
        shared = {
            "k": number,
            "below": below,
            "exact_per_second": len(queries) / slow,
            "searched": found["searched"],
        }
        for step, tried in enumerate(found["tried"]):
            index.ef_factor = 2**step
            fast, _ = seconds(lambda: index.search(queries, number, below))  # noqa: B023
            rows.append(
                {
                    **shared,
                    **tried,
                    "hnsw_per_second": len(queries) / fast,
                    "measuring_seconds": measured,
                }
            )
    index.ef_factor = 1
    return rows


def seconds(work: Any) -> tuple[float, Any]:
    """Seconds of a call, and its result."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def peak_gib() -> float:
    """Largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measure(vectors: np.ndarray, options: argparse.Namespace) -> dict[str, Any]:
    """Everything about one size."""
    queries = queries_of(vectors, options.queries)
    if options.near_duplicates:
        originals = add_near_duplicates(vectors, options.near_duplicates)
        few = np.random.default_rng(4).choice(
            originals, min(len(originals), options.queries // 10), replace=False
        )
        queries[: len(few)] = vectors[few]
    before = peak_gib()
    build, index = seconds(lambda: VectorIndex.build(vectors, "hnsw"))
    row = {"rows": len(vectors), "dimension": vectors.shape[1]}
    row |= {"build_seconds": build, "rss_before_gib": before, "rss_built_gib": peak_gib(), "searches": []}
    exact = VectorIndex.build(vectors, "exact")
    for number, below in [(k, None) for k in options.k] + [(k, ALPHA) for k in options.k]:
        slow, right = seconds(lambda: exact.search(queries, number, below))  # noqa: B023
        fast, found = seconds(lambda: index.search(queries, number, below))  # noqa: B023
        row["searches"].append(
            {
                "k": number,
                "below": below,
                "recall": recall(found, right),
                "exact_per_second": len(queries) / slow,
                "hnsw_per_second": len(queries) / fast,
            }
        )
    if options.target is not None:
        row["efforts"] = efforts(index, queries, options)
    row["rss_peak_gib"] = peak_gib()
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--dimension", type=int, default=384)
    parser.add_argument(
        "--vectors", type=Path, help="unit vectors (rows, dimension) to take instead of made-up ones"
    )
    parser.add_argument("--near_duplicates", type=float, default=0.0, help="share of the rows, in [0, 1)")
    parser.add_argument("--target", type=float, help="mean recall to which the search effort is raised")
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--k", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--json", type=Path, help="where the rows go as well")
    options = parser.parse_args(arguments)
    if options.vectors or len(options.sizes) == 1:
        vectors = (
            np.load(options.vectors) if options.vectors else made_up(options.sizes[0], options.dimension, 0)
        )
        rows = [measure(vectors, options)]
    else:
        rows = [in_own_process(size, options) for size in options.sizes]
    show(rows, options.json)


def in_own_process(size: int, options: argparse.Namespace) -> dict[str, Any]:
    """The row of one size."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "row.json"
        numbers = {
            "sizes": size,
            "dimension": options.dimension,
            "queries": options.queries,
            "near_duplicates": options.near_duplicates,
            **({} if options.target is None else {"target": options.target}),
        }
        arguments = [text for name, value in numbers.items() for text in (f"--{name}", str(value))]
        arguments += ["--k", *map(str, options.k), "--json", str(file)]
        subprocess.run([sys.executable, __file__, *arguments], check=True, stdout=subprocess.DEVNULL)
        (row,) = json.loads(file.read_text())["rows"]
        return dict(row)


if __name__ == "__main__":
    main()
