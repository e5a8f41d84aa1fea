"""Accuracy of each run of the recipe ``mixed_fleet`` by who holds a question's topic: whose topics were learned.

A phone is small if the adapter's step did not fit on it in the run ``dropouts``. The topic of a question is the last two
words of its input. The accuracy is the mean of a run's last four measurements.

* both: small and capable phones hold the topic; capable phones, small phones: they alone; nobody: no client does

Run: fedlight run mixed_fleet --output RUN, then python benchmarks/fleet_topics.py RUN [--json FILE]
"""

import argparse
import csv
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from shown_rows import show

LAST = 4
RUNS = {
    "dropouts": "dropouts",
    "forward": "forward",
    "forward, light": "forward_light",
    "FlexLoRA, ranks by device": "flexlora",
    "HetLoRA, ranks by device": "hetlora",
    "buffered": "buffered",
}
"""Method -> its folder in the folder of a seed."""


def topic(fields: dict[str, str]) -> str:
    """Return the topic of a question.

    Example:
        >>> topic({"input": "finn reads maps . eva roses"})
        'eva roses'
    """
    return " ".join(fields["input"].split()[-2:])


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSON-lines file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def holders(seed: Path) -> dict[str, str]:
    """Return topic -> who holds it; topics without a holder are missing."""
    with (seed / "dropouts" / "visits.csv").open(newline="", encoding="utf-8") as lines:
        small = {row["client"] for row in csv.DictReader(lines) if row["reason"] == "out_of_memory"}
    clients: dict[str, set[str]] = defaultdict(set)
    for row in read_lines(seed / "dropouts" / "augmentation" / "private.jsonl"):
        clients[topic(row["fields"])].add(row["client"])
    return {
        name: "small phones" if of <= small else "both" if of & small else "capable phones"
        for name, of in clients.items()
    }


def measure(seed: Path) -> list[dict[str, Any]]:
    """Return the rows of one seed."""
    held, rows = holders(seed), []
    for method, folder in RUNS.items():
        epochs = sorted(
            (seed / folder / "tasks").glob("epoch_*"),
            key=lambda place: int(place.name.removeprefix("epoch_")),
        )
        scores = defaultdict(list)
        for place in epochs[-LAST:]:
            for row in read_lines(place / "domain.jsonl"):
                scores[held.get(topic(row["fields"]), "nobody")].append(row["score"])
        rows += [
            {
                "method": method,
                "holders": name,
                "score": mean(found),
                "questions": len(found) // len(epochs[-LAST:]),
                "seed": int(seed.name.removeprefix("seed")),
            }
            for name, found in sorted(scores.items())
        ]
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Print the rows and write them to ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path, help="folder of a finished run of mixed_fleet")
    parser.add_argument("--json", type=Path, help="where the rows go as well")
    options = parser.parse_args(argv)
    rows = [row for seed in sorted(options.run.glob("seed[0-9]*")) for row in measure(seed)]
    if not rows:
        parser.error(
            f"{options.run} has no folder of a seed: make it with fedlight run mixed_fleet --output {options.run}"
        )
    show(rows, options.json)


if __name__ == "__main__":
    main()
