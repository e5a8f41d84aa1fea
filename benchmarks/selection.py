"""Time of the server to choose a centre for every client of FedDCA, by the number of clients.

The paper (https://arxiv.org/abs/2409.20135, section 4.2) states O(N (N xi + xi log xi)) for N clients with xi centres. This
library sums up the chosen centres instead of comparing with each, which leaves O(N (xi + xi log xi)). ``growth`` is the
exponent fitted to the seconds from 100 clients on: 2 would be the paper's, 1 is linear. The paper's way is measured beside
it, up to --paper_limit clients, and both must choose the same.

Seconds are processor time, so other work on the machine does not count. Centres are made up: unit vectors around a few
topics, sizes between 1 and 100.

Run: OMP_NUM_THREADS=1 python benchmarks/selection.py [--clients 10 100 1000 10000] [--json FILE]
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedlight.datamodules.vectors.clusters import Clusters
from fedlight.datamodules.vectors.selection import choose, select_centers
from fedlight.support.seeding import derive_seed

FITTED_FROM = 100
Choice = dict[str, int]


def made_up(clients: int, centers: int, dimension: int) -> dict[str, Clusters]:
    """What so many clients could send."""
    rng = np.random.default_rng(0)
    topics = rng.normal(size=(20, dimension))
    clusters = {}
    for client in range(clients):
        vectors = topics[rng.integers(len(topics), size=centers)] + rng.normal(size=(centers, dimension))
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        clusters[f"c{client:06d}"] = Clusters(vectors.astype(np.float32), rng.integers(1, 101, size=centers))
    return clusters


def select_as_printed(clusters: Mapping[str, Clusters], seed: int) -> Choice:
    """Algorithm 1 with the similarity to every chosen centre, in the same order of clients."""
    names = sorted(clusters)
    order = np.random.default_rng(derive_seed(seed, "order of centres")).permutation(len(names))
    chosen = np.empty((len(names), clusters[names[0]].centers.shape[1]))
    result = {}
    for turn, number in enumerate(order):
        own = clusters[names[number]]
        similarities = (own.centers.astype(np.float64) @ chosen[:turn].T).sum(axis=1)
        result[names[number]] = choose(similarities, own.sizes, turn)
        chosen[turn] = own.centers[result[names[number]]]
    return result


def seconds(
    select: Callable[[Mapping[str, Clusters], int], Choice], clusters: Mapping[str, Clusters]
) -> tuple[float, Choice]:
    """The fastest of three runs, or one of more than a second, and its choice."""
    times: list[float] = []
    while len(times) < 3 and sum(times) < 1:
        start = time.process_time()
        result = select(clusters, 0)
        times.append(time.process_time() - start)
    return min(times), result


def growth(clients: Sequence[int], times: Sequence[float]) -> float:
    """The exponent e of seconds ~ clients^e, by least squares of logarithms; nan with fewer than two sizes.

    Example:
        >>> round(growth([100, 1000], [0.01, 1.0]), 3)
        2.0
    """
    kept = [(size, one) for size, one in zip(clients, times, strict=True) if size >= FITTED_FROM]
    if len(kept) < 2:
        return float("nan")
    return float(np.polyfit(*np.log(np.array(kept)).T, 1)[0])


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each number of clients."""
    rows = []
    for clients in options.clients:
        clusters = made_up(clients, options.centers, options.dimension)
        ours, chosen = seconds(select_centers, clusters)
        row: dict[str, Any] = {"clients": clients, "seconds": ours, "paper_seconds": None, "same": None}
        if clients <= options.paper_limit:
            row["paper_seconds"], printed = seconds(select_as_printed, clusters)
            row["same"] = sum(chosen[name] == printed[name] for name in chosen) / clients
        rows.append(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 30, 100, 300, 1000, 3000, 10_000])
    parser.add_argument("--centers", type=int, default=10)
    parser.add_argument("--dimension", type=int, default=384)
    parser.add_argument("--paper_limit", type=int, default=3000)
    parser.add_argument("--json", type=Path, help="where the rows go as well")
    options = parser.parse_args(arguments)
    rows = measure(options)
    print("| clients | seconds | as printed, seconds | same choice |\n|---|---|---|---|")
    for row in rows:
        paper = "-" if row["paper_seconds"] is None else f"{row['paper_seconds']:.4f} | {row['same']:.1%}"
        print(f"| {row['clients']:,} | {row['seconds']:.4f} | {paper} |")
    grows = {
        name: growth([row["clients"] for row in kept], [row[name] for row in kept])
        for name, kept in (
            ("seconds", rows),
            ("paper_seconds", [row for row in rows if row["paper_seconds"]]),
        )
    }
    print(
        f"growth from {FITTED_FROM} clients on: {grows['seconds']:.2f}, as printed {grows['paper_seconds']:.2f}"
    )
    if options.json:
        growths = {
            "clients": "growth",
            "exponent": grows["seconds"],
            "paper_exponent": grows["paper_seconds"],
        }
        options.json.write_text(json.dumps({"rows": [*rows, growths]}, indent=1))


if __name__ == "__main__":
    main()
