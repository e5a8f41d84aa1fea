"""The recipe polis on several conversations, with contested pairs and with all pairs.

Rows are those of the recipe's table, with the conversation and the set of pairs; rows of the method ``data`` count people
and pairs. A second call goes on where the first one stopped.

Run: python benchmarks/polis.py --polis FOLDER --model FOLDER_OR_HUB_NAME [--pairs contested] [--seeds 0 1] [KEY=VALUE ...]
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shown_rows import show

from fedlight.recipes import recipe
from fedlight.recipes.polis import opinion_table
from fedlight.report.figures.plots import draw_intervals, estimates
from fedlight.report.figures.style import save
from fedlight.support.files import result_of

FILES = ("votes.jsonl.gz", "statements.jsonl.gz")


def run(
    conversation: Path,
    pairs: str,
    seeds: list[int],
    folder: Path,
    overrides: list[str],
    methods: list[str] | None = None,
) -> list[dict[str, Any]]:
    """Return the rows of one conversation and set of pairs, for each seed.

    Args:
        conversation: folder of its two files.
        pairs: ``contested`` or ``all``.
        seeds: seeds of the recipe.
        folder: folder of the runs.
        overrides: ``KEY=VALUE`` changes of the recipe.
        methods: methods of the recipe's table to train, FedBis among them; None: all.
    """
    votes, statements = (conversation / name for name in FILES)
    told = [f"votes={votes}", f"statements={statements}", f"pairs={pairs}", *overrides]
    if methods:
        known = recipe.load("polis")["stages"]["table"]["with"]["methods"]
        stages = [Path(place).name for name in methods for place in known[name].values()]
        recipe.run("polis", seeds, folder, told, only=stages)
        chosen = {name: known[name] for name in methods}
        rows = [{**row, "seed": seed} for seed in seeds for row in _table(chosen, folder / f"seed{seed}")]
    else:
        rows = recipe.run("polis", seeds, folder, told)["rows"]
    for seed in seeds:
        rows.append({"method": "data", **result_of(folder / f"seed{seed}" / "opinions"), "seed": seed})
    return [{"conversation": conversation.name, "pairs": pairs, **row} for row in rows]


def _table(methods: dict[str, dict[str, str]], run: Path) -> list[dict[str, Any]]:
    """Return the rows of some methods in the folder of a run, beside the rules that read no text."""
    places = {
        name: {key: place.replace("${run}", str(run)) for key, place in of.items()}
        for name, of in methods.items()
    }
    train, test = (str(run / "opinions" / f"{side}.jsonl") for side in ("train", "test"))
    rows: list[dict[str, Any]] = opinion_table(places, train, test)["rows"]
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Run all of it and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--polis", type=Path, required=True, help="folder with a folder for each conversation"
    )
    parser.add_argument("--model", required=True, help="folder or hub name of a sentence encoder")
    parser.add_argument("--conversations", nargs="+", help="names of folders; default: all")
    parser.add_argument("--pairs", nargs="+", choices=("contested", "all"), default=["contested", "all"])
    parser.add_argument("--seeds", nargs="+", type=int, default=recipe.load("polis")["seeds"])
    parser.add_argument("--methods", nargs="+", help="methods of the recipe's table, FedBis among them")
    parser.add_argument("--output", type=Path, default=Path("runs/polis"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", help="file of a figure with the accuracies on contested pairs")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="changes of the recipe")
    options = parser.parse_args(argv)
    found = sorted(path.name for path in options.polis.iterdir() if (path / FILES[0]).is_file())
    rows = [
        row
        for name in options.conversations or found
        for pairs in options.pairs
        for row in run(
            options.polis / name,
            pairs,
            options.seeds,
            options.output / name / pairs,
            [f"model={options.model}", *options.overrides],
            options.methods,
        )
    ]
    show(rows, options.json)
    if options.figure is not None:
        panels = {
            name: estimates(
                [row for row in rows if (row["conversation"], row["pairs"]) == (name, "contested")], "own"
            )
            for name in options.conversations or found
        }
        shown = {name.replace("_", " "): of for name, of in panels.items()}
        save(
            draw_intervals(shown, "accuracy on contested pairs, mean over people, 95 % interval"),
            options.figure,
        )


if __name__ == "__main__":
    main()
