"""``fedlight methods`` and ``fedlight devices``: what there is, with one line each, from the files themselves."""

from collections.abc import Iterable
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table

from fedlight.conf import path as conf_path
from fedlight.lightning_cli.help_page import classes_in, classes_of, summary

METHODS = {
    "algorithms: --federated.algorithm NAME": lambda: classes_of("Algorithm"),
    "groups of FedBiscuit: --federated.algorithm.assignment NAME": lambda: classes_of("Assignment"),
    "server optimizers: --federated.server NAME": lambda: classes_of("ServerOptimizer"),
    "aggregations: --federated.aggregation NAME": lambda: classes_of("Aggregation"),
    "codecs of the wire: --federated.channel.up NAME": lambda: classes_of("Codec"),
    "augmentations of clients' rows: --data.augmentation NAME": lambda: classes_in("augmentation"),
    "judges": lambda: classes_in("judges"),
    "attacks, among trainer.callbacks": lambda: classes_of("Attack", "callbacks.attacks"),
    "tasks with right answers": lambda: classes_of("Task", "evaluation.tasks"),
}
"""Heading -> names of public classes."""


def first_comment(file: Path) -> str:
    """Return the first line of a YAML file, its title."""
    return file.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")


def titles(folder: Path) -> list[tuple[str, str]]:
    """Return the names of a folder's YAML files, and their titles."""
    return [(file.stem, first_comment(file)) for file in sorted(folder.glob("*.yaml"))]


def methods() -> None:
    """Print the methods that a config can name."""
    for heading, names in METHODS.items():
        _print(heading, [(name, summary(name)) for name in names()])
    _print("recipes: fedlight run NAME", titles(conf_path("recipes")))


def devices() -> None:
    """Print the profiles of devices, and the fleets of them."""
    rows = []
    for file in sorted(conf_path("devices").glob("*.yaml")):
        profile = yaml.safe_load(file.read_text(encoding="utf-8"))
        figures = (f"{profile[key]:g}" for key in ("memory_gib", "tflops", "download_mbps", "upload_mbps"))
        rows.append((file.stem, *figures, first_comment(file)))
    columns = ("", "GiB", "TFLOPS", "Mbps down", "Mbps up", "")
    _print("devices: --federated.fleet.devices.NAME SHARE", rows, columns)
    _print("fleets: --federated.fleet devices/fleets/NAME.yaml", titles(conf_path("devices/fleets")))


def _print(heading: str, rows: Iterable[tuple[str, ...]], columns: tuple[str, ...] = ("", "")) -> None:
    table = Table(box=None, pad_edge=False, show_header=any(columns), padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name, justify="right" if name else "left", no_wrap=not rows or bool(name))
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False)
    console.print(f"\n{heading}", markup=False)  # rich would take words in brackets for styles
    console.print(table, markup=False)
