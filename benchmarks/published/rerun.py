"""Reruns measurements, two at a time where there are two cores, and says what came out of each."""

import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from published.commands import missing, rows_of
from published.compare import Comparison, compare
from published.figures import Figure
from published.machine import machine
from published.measurements import RERUN, Measurement, Published
from published.tables import figures

WIDTH = 160  # characters, where there is no terminal
SLOWEST = 10  # times the expected seconds after which a measurement is stopped
SHORTEST_LIMIT_SECONDS = 300.0


@dataclass
class Outcome:
    """What became of a measurement: ``same``, ``differs``, ``failed`` or ``skipped``, and the reason."""

    name: str
    figures: int
    verdict: str
    why: str = ""
    seconds: float = 0.0
    expected: float = 0.0
    comparison: Comparison = field(default_factory=Comparison)


def rerun(
    published: Published, folder: Path, kinds: Sequence[str] | None = None, only: Sequence[str] | None = None
) -> int:
    """Reruns and compares, prints a table and writes ``FOLDER.json``.

    Args:
        published: what there is.
        folder: for the commands' files; a folder in it for each measurement.
        kinds: of ``rerun``: ``check`` or ``reproduce``; both if not given.
        only: names of the measurements.

    Returns:
        0 where all compared figures are the published ones, else 1.

    Raises:
        ValueError: one of the names is no measurement that is rerun.
    """
    wanted = [one for one in published.measurements.values() if one.is_rerun]
    wanted = [one for one in wanted if one.rerun in (kinds or RERUN) and one.name in (only or [one.name])]
    if lost := set(only or []) - {one.name for one in wanted}:
        names = ", ".join(one.name for one in published.measurements.values() if one.is_rerun)
        raise ValueError(f"{sorted(lost)[0]!r} is not rerun here; {names} can be")
    start = time.monotonic()
    shown = {name: figures(published, one) for name, one in published.measurements.items()}
    here = machine()["class"]
    # The longest first, so that the others fill the gaps.
    wanted.sort(key=lambda one: -one.rerun_seconds)
    console = Console(soft_wrap=False)
    if not console.is_terminal:
        console = Console(width=WIDTH)
    with ThreadPoolExecutor(max(1, min(2, os.cpu_count() or 1))) as pool:
        outcomes = list(
            pool.map(partial(_one, folder=folder, shown=shown, here=here, console=console), wanted)
        )
    not_rerun = [one for one in published.measurements.values() if one not in wanted]
    seconds = time.monotonic() - start
    _show(console, outcomes, not_rerun, shown, seconds)
    report = {
        "machine": here,
        "seconds": round(seconds, 1),
        "published": sum(map(len, shown.values())),
        "compared": sum(one.comparison.compared for one in outcomes),
        "partly": sum(one.comparison.partly for one in outcomes),
        "skipped": [one.name for one in outcomes if one.verdict == "skipped"],
        "measurements": [asdict(one) for one in outcomes],
        "not_rerun": [
            {"name": one.name, "figures": len(shown[one.name]), "why": _why_not(one)} for one in not_rerun
        ],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder.parent / f"{folder.name}.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    return int(any(one.verdict in ("differs", "failed") for one in outcomes))


def _one(
    measurement: Measurement, folder: Path, shown: dict[str, list[Figure]], here: str, console: Console
) -> Outcome:
    own = shown[measurement.name]
    outcome = Outcome(measurement.name, len(own), "skipped", expected=measurement.rerun_seconds)
    if "machine" not in measurement.record:
        outcome.verdict, outcome.why = (
            "failed",
            "its record was not made by a run: record it, or set rerun to no",
        )
        return outcome
    recorded_at = measurement.record["machine"]["class"]
    if lost := missing(measurement):
        outcome.why = lost
        return outcome
    if all(measurement.tolerance_of(one.column, here == recorded_at) == "none" for one in own):
        outcome.why = f"recorded on {recorded_at}; on {here} other digits are right as well"
        return outcome
    console.print(f"{measurement.name}: about {measurement.rerun_seconds:.0f} s", highlight=False)
    limit = max(SHORTEST_LIMIT_SECONDS, SLOWEST * measurement.rerun_seconds)
    try:
        command = measurement.rerun_command or measurement.command
        rows, outcome.seconds = rows_of(measurement, command, folder / measurement.name, limit)
    except (RuntimeError, ValueError) as error:
        outcome.verdict, outcome.why = "failed", str(error)
        return outcome
    outcome.comparison = compare(measurement, own, rows, here == recorded_at)
    differences = outcome.comparison.differences
    outcome.verdict = "differs" if differences else "same"
    outcome.why = "\n".join(differences) or outcome.comparison.worst
    return outcome


def _why_not(measurement: Measurement) -> str:
    why = f": {measurement.why}" if measurement.why else ""
    return f"{RERUN[measurement.rerun].replace('`', '')}{why}"


def _show(
    console: Console,
    outcomes: Sequence[Outcome],
    not_rerun: Sequence[Measurement],
    shown: dict[str, list[Figure]],
    seconds: float,
) -> None:
    table = Table(title="Published figures, rerun")
    for name in (
        "measurement",
        "figures",
        "compared",
        "off, of its tolerance",
        "verdict",
        "seconds of about",
        "",
    ):
        table.add_column(
            name, justify="right" if name in ("figures", "compared", "seconds of about") else "left"
        )
    colours = {"same": "green", "differs": "red", "failed": "red", "skipped": "yellow"}
    for one in outcomes:
        off = f"{one.comparison.off:.2f}" if one.comparison.compared else ""
        cells: list[Any] = [one.name, str(one.figures), str(one.comparison.compared), off]
        cells += [f"[{colours[one.verdict]}]{one.verdict}[/]", f"{one.seconds:.0f} of {one.expected:.0f}"]
        table.add_row(*cells, _plain(one.why))
    console.print(table)
    if not_rerun:
        rest = Table(title="Not rerun by this command")
        for name in ("measurement", "figures", "why"):
            rest.add_column(name)
        for one in not_rerun:
            rest.add_row(one.name, str(len(shown[one.name])), _plain(_why_not(one)))
        console.print(rest)
    total = sum(map(len, shown.values()))
    compared = sum(one.comparison.compared for one in outcomes)
    partly = sum(one.comparison.partly for one in outcomes)
    of_seeds = f" ({partly} of them by some of their seeds)" if partly else ""
    left_out = [one.name for one in outcomes if one.verdict == "skipped"]
    skipped = f"; skipped: {', '.join(left_out)}" if left_out else ""
    console.print(
        f"{total} published figures, {compared} compared{of_seeds}, {total - compared} not{skipped}; {seconds:.0f} s",
        highlight=False,
    )


def _plain(text: str) -> str:
    """Without brackets being read as markup."""
    return text.replace("[", r"\[")
