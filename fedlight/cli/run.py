"""``fedlight run NAME``: a recipe, or with ``--dry-run`` the checks before it."""

import argparse
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedlight.cli.listing import titles
from fedlight.conf import path as conf_path
from fedlight.support.console import OneLineArguments


def main(argv: list[str]) -> None:
    """Run ``fedlight run NAME [--seeds 0 1 2] [--output DIR] [--only STAGE ...] [--processes N] [KEY=VALUE ...]``."""
    parser = OneLineArguments(
        "fedlight run", description=_listing(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", help="a recipe's name or the path of a recipe's YAML file")
    parser.add_argument("--seeds", type=int, nargs="+", help="one run for each; default: the recipe's")
    parser.add_argument("--output", type=Path, help="folder of the results; default: runs/NAME")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="STAGE",
        help="these stages and those that they read from; results.json is not written",
    )
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="share the clients of each round, and predictions, among N processes with one thread each (or "
        "--threads); the results are the same for any N",
    )
    parser.add_argument("--twin", action="store_true", help="the recipe's small copy on the embedded world")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check settings, data, models, memory, disk and keys, and do nothing; ends with 0 if all is well, 2 at a "
        "problem, 3 if something could not be checked",
    )
    parser.add_argument("set", nargs="*", default=[], metavar="KEY=VALUE", help="as rounds=3, of the recipe")
    # Removed first: argparse would read those after --seeds as seeds.
    pairs = [*pairwise(["", *argv])]
    changes = [word for before, word in pairs if _is_change(before, word)]
    # Intermixed: words for `set` may also come after options.
    options = parser.parse_intermixed_args([word for before, word in pairs if not _is_change(before, word)])
    if options.dry_run and options.only:
        raise ValueError("--dry-run checks all stages: leave out --only, or --dry-run")
    given: dict[str, Any] = {
        name: getattr(options, name) for name in ("name", "seeds", "output", "twin", "processes")
    }
    given["overrides"] = changes + options.set
    if options.dry_run:
        from fedlight.preflight.dry_run import dry_run

        sys.exit(dry_run(**given))
    from fedlight.recipes.recipe import run

    run(**given, only=options.only)


def _is_change(before: str, word: str) -> bool:
    """Tell whether a word changes a value of the recipe; the folder behind ``--output`` may be called lr=0.1."""
    return "=" in word and not word.startswith("-") and before != "--output"


def _listing() -> str:
    recipes = titles(conf_path("recipes"))
    width = max(len(name) for name, _ in recipes)
    return "Recipes:\n" + "\n".join(f"  {name:<{width}}  {title}" for name, title in recipes)
