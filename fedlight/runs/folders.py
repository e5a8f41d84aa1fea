"""Folders of runs, and their names on a page."""

import re
from collections.abc import Sequence
from pathlib import Path

from fedlight.support.files import read_text

SEED = re.compile(r"seed(\d+)")
SEEDS = re.compile(r"seeds?(_?\d+)+")  # a stage over several seeds has a folder such as seeds_0_1
DEPTH = 4  # RECIPE/seed0/STAGE, and one more for a folder of recipes


def methods(pairs: Sequence[tuple[Path, Path]]) -> list[str]:
    """Return for each run, given with the folder where it was found, a name that it shares only with other seeds.

    Examples:
        >>> methods([(Path("/r/demo/seed0/fedavg"), Path("/r/demo")), (Path("/r/demo/seed1/fedavg"), Path("/r/demo"))])
        ['fedavg', 'fedavg']
        >>> methods([(Path("/r/a/fedavg"), Path("/r/a")), (Path("/r/b/fedavg"), Path("/r/b"))])
        ['a/fedavg', 'b/fedavg']
        >>> methods([(Path("/x/a/run"), Path("/x/a/run")), (Path("/y/a/run"), Path("/y/a/run"))])
        ['x/a/run', 'y/a/run']
    """
    homes = {home for _, home in pairs}
    short = [
        [part for part in run.relative_to(home).parts if not SEEDS.fullmatch(part)] for run, home in pairs
    ]
    if len(homes) == 1:
        return ["/".join(parts) or home.name for parts, (_, home) in zip(short, pairs, strict=True)]
    deepest = max(len(home.parts) for home in homes)  # so many parts tell any two folders apart
    depth = next(n for n in range(1, deepest + 1) if len({home.parts[-n:] for home in homes}) == len(homes))
    return ["/".join((*home.parts[-depth:], *parts)) for parts, (_, home) in zip(short, pairs, strict=True)]


def labels(pairs: Sequence[tuple[Path, Path]]) -> list[str]:
    """Return the names of `methods`, with the seed where only that tells two runs apart.

    Examples:
        >>> labels([(Path("/r/demo/seed0/fedavg"), Path("/r/demo")), (Path("/r/demo/seed1/fedavg"), Path("/r/demo"))])
        ['fedavg, seed 0', 'fedavg, seed 1']
    """
    names = methods(pairs)
    taken: dict[str, int] = {}
    made = []
    for name, (run, _) in zip(names, pairs, strict=True):
        seed = SEED.fullmatch(run.parent.name)
        label = f"{name}, seed {seed[1]}" if names.count(name) > 1 and seed else name
        taken[label] = taken.get(label, 0) + 1
        made.append(label if taken[label] == 1 else f"{label} ({taken[label]})")
    return made


def runs_below(folder: Path, depth: int = DEPTH, above: tuple[Path, ...] = ()) -> list[Path]:
    """Return the folder itself if it is a run's, else those of the runs in it; links to a folder ``above`` are left out."""
    if is_run(folder):
        return [folder]
    above = (*above, folder.resolve())  # a link upwards would be followed without end
    children = sorted(child for child in folder.iterdir() if child.is_dir() and child.resolve() not in above)
    return [run for child in children for run in runs_below(child, depth - 1, above)] if depth else []


def is_run(folder: Path) -> bool:
    """Tell whether a Lightning command or a stage has written here."""
    if any((folder / name).is_file() for name in ("run.json", "visits.csv", "done.json")):
        return True
    if (folder / "config.yaml").is_file() or any(folder.glob("metrics/version_*/*.*")):
        return True
    settings = folder / "settings.json"
    # Other programs write settings.json, too.
    return settings.is_file() and '"stage"' in read_text(settings, errors="replace")


def begun(run: Path) -> tuple[bool, str, float, str]:
    """Return a key to sort by: seed, then the start of the stage; stages over all seeds come last."""
    first = run / "settings.json"
    started = first.stat().st_mtime if first.is_file() else 0.0
    seed = run.parent.name if SEED.fullmatch(run.parent.name) else ""
    return run.parent.name.startswith("seeds_"), seed, started, run.name


def versions(run: Path, name: str) -> list[Path]:
    """Return a file of each version of the CSV logger, the oldest first."""
    files = [*run.glob(f"metrics/version_*/{name}")] or run.glob(f"*/version_*/{name}")
    return sorted(files, key=_version)


def _version(file: Path) -> int:
    name = file.parent.name.removeprefix("version_")
    return int(name) if name.isdecimal() else -1  # by number, as version_10 sorts before version_9 as text
