"""FedBis on the embedded world, mean of three seeds: how far from chance to the oracle the selector comes, and who wins.

The oracle knows every client's taste; its accuracy on held-out votes is what their noise leaves possible for one taste.
``of the way`` is (accuracy - 0.5) / (the oracle's - 0.5). The win rate is the oracle's verdict on held-out prompts.

Run: python benchmarks/fedbis_toy.py [--seeds 0 1 2] [--output DIR] [--json FILE]    (skips what DIR has already)
"""

import argparse
import json
from pathlib import Path
from statistics import mean, stdev

from fedlight.recipes.recipe import run


def main() -> None:
    """Runs the recipe ``demo`` for every seed and prints one line for each, then mean and spread."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=Path("runs/fedbis_toy"))
    parser.add_argument("--json", type=Path, help="where the rows go as well")
    options = parser.parse_args()
    results = run("demo", options.seeds, options.output)
    rows = {(row["method"], row["seed"]): row for row in results["rows"]}
    columns: dict[str, list[float]] = {
        "accuracy": [],
        "oracle's": [],
        "of the way": [],
        "win rate": [],
        "ceiling": [],
    }
    for seed in options.seeds:
        ours, oracle = rows["FedBis", seed], rows["oracle", seed]
        accuracy, possible = ours["selector_accuracy"], oracle["selector_accuracy"]
        values = (
            accuracy,
            possible,
            (accuracy - 0.5) / (possible - 0.5),
            ours["win_rate_vs_raw"],
            oracle["win_rate_vs_raw"],
        )
        ours["of_the_way"] = values[2]
        for column, value in zip(columns.values(), values, strict=True):
            column.append(value)
        print(
            f"seed {seed}: "
            + "   ".join(f"{name} {value:.3f}" for name, value in zip(columns, values, strict=True))
        )
    if len(options.seeds) > 1:
        print(
            "mean:   " + "   ".join(f"{name} {mean(v):.3f} ± {stdev(v):.3f}" for name, v in columns.items())
        )
    if options.json:
        options.json.write_text(json.dumps({"rows": results["rows"]}, indent=1))


if __name__ == "__main__":
    main()
