"""Seconds of a round by the number of processes: a model from counted bytes, beside measured rounds of a few processes.

The end of a round moves, for P trained numbers, K clients and N processes, to each process

    sums              32 P (N - 1) / N bytes: a ring sends two digits of 8 bytes twice
    median            8 P (K - k) / N bytes of updates, k of the clients being its own, and 8 P (N - 1) / N of the result
    before            8 P (K - k): a median of whole uploads, as it was before each process had a share of the coordinates
    messages          1300 bytes from each other process in each of 8 small messages

Seconds are bytes over the bandwidth, plus the steps of a ring of some blocks, 2 (N - 1), or of a tree, log2(N), times the
latency, plus the messages that process 0 handles one after another. Neither congestion of a network nor the arithmetic
is in the model; visits are of equal length and end together. So it tells which part grows, not what a cluster needs.

With --measure, forked processes on this host add up a million numbers and take a median. All share its cores.

Run: OMP_NUM_THREADS=1 python benchmarks/ranks_model.py [--numbers 40e6] [--measure 2 4 8]
"""

import argparse
import math
import multiprocessing
import socket
import time
from collections.abc import Sequence
from typing import Any

import torch

from fedlight.federation.aggregation import CoordinateMedian
from fedlight.federation.algorithm import WeightedSum
from fedlight.federation.client import Update
from fedlight.federation.exact_sum import MOST_BYTES
from fedlight.processes.joining import Others, _store
from fedlight.processes.team import Team

SIZES = (2, 4, 8, 16, 64, 256, 1000)
MESSAGES, MESSAGE, HANDLING = 8, 1300, 1e-5  # of a round; bytes of each; seconds for each


def megabytes(size: int, numbers: float, clients: int) -> dict[str, float]:
    """Return the MB that a process receives for each part of a round."""
    model = 8 * numbers * (size - 1) / size / 1e6
    return {
        "sums": 4 * model,
        "median": model * (clients / size + 1),
        "before": model * clients,
        "messages": MESSAGES * MESSAGE * (size - 1) / 1e6,
    }


def seconds(size: int, options: argparse.Namespace) -> dict[str, float]:
    """Return the seconds of each part of a round: a bound for trees, which pass on whole messages."""
    counts, depth = megabytes(size, options.numbers, options.clients), math.ceil(math.log2(size))
    wire = {part: count / options.bandwidth for part, count in counts.items()}
    tree = depth * options.latency
    message = 3 * 2 * size * HANDLING + 4 * options.latency  # a barrier, lengths and bytes
    return {
        "sums": wire["sums"]
        + math.ceil(16 * options.numbers / MOST_BYTES) * 2 * (size - 1) * options.latency,
        "median": wire["median"] + (depth - 1) * wire["sums"] / 4 + size * tree + 2 * message,
        "before": depth * wire["before"] + options.clients * tree,
        "messages": wire["messages"] + MESSAGES * message,
    }


def _process(rank: int, size: int, port: int, numbers: int, answers: Any) -> None:
    """Combine one update of each process in both ways, and tell MB and seconds of each."""
    torch.set_num_threads(1)
    others, counted = Others(rank, size, _store(rank, "127.0.0.1", port)), [0.0]

    def count(parts: list[memoryview]) -> list[memoryview]:
        counted[0] += sum(len(part) for number, part in enumerate(parts) if number != rank)
        return parts

    def add(tensor: torch.Tensor) -> None:
        counted[0] += 2 * tensor.nbytes * (size - 1) / size
        others.add(tensor)

    team = Team(
        rank, size, lambda data: count(others.exchange(data)), add, lambda parts: count(others.swap(parts))
    )
    found = {}
    for name, aggregation in {"sums": WeightedSum("weight"), "median": CoordinateMedian()}.items():
        movement = torch.randn(numbers, generator=torch.Generator().manual_seed(rank)).double()
        aggregation.add(Update(str(rank), {"w": movement}, weight=1.0))
        team.barrier()
        start, counted[0] = time.perf_counter(), 0.0
        aggregation.sums.add_up(team)  # type: ignore[attr-defined]
        found[name] = counted[0] / 1e6, time.perf_counter() - start
    team.barrier()
    answers.put(found)


def measured(size: int, numbers: int) -> dict[str, float]:
    """Return counted MB, those of the model, and seconds, of a round of one client in each of several processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    forks = multiprocessing.get_context("fork")
    answers = forks.Queue()
    processes = [
        forks.Process(target=_process, args=(rank, size, port, numbers, answers)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    found = [answers.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    expected = megabytes(size, numbers, size)
    row: dict[str, float] = {"processes": size}
    for part in found[0]:
        most, longest = map(max, zip(*(each[part] for each in found), strict=True))
        row |= {f"{part} MB": most, f"{part} MB, model": expected[part], f"{part} s": longest}
    return row


def table(lines: Sequence[dict[str, float]]) -> str:
    """The rows as Markdown."""
    head = [f"| {' | '.join(lines[0])} |", f"|{'---|' * len(lines[0])}"]
    return "\n".join(
        [*head, *(f"| {' | '.join(f'{value:.4g}' for value in line.values())} |" for line in lines)]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--numbers", type=float, default=40e6, help="trained; 40e6: LoRA r 16 on all layers of 7B"
    )
    parser.add_argument("--clients", type=int, default=1000, help="of a round")
    parser.add_argument("--visit", type=float, default=60.0, help="seconds of a client's visit")
    parser.add_argument("--bandwidth", type=float, default=1250.0, help="MB/s of a process")
    parser.add_argument("--latency", type=float, default=5e-5, help="seconds of a message")
    parser.add_argument(
        "--measure", type=int, nargs="*", default=[], help="numbers of processes to measure here"
    )
    options = parser.parse_args(arguments)
    visits = {size: math.ceil(options.clients / size) * options.visit for size in SIZES}
    model = [{"processes": size, "visits": visits[size], **seconds(size, options)} for size in SIZES]
    here = [measured(size, 1_000_000) for size in options.measure]
    print(f"Model, seconds of a round: {vars(options)}\n{table(model)}")
    if here:
        print(f"Measured here, one client of 1e6 numbers in each process:\n{table(here)}")


if __name__ == "__main__":
    main()
