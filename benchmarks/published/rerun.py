"""Reruns measurements, two at a time where there are two cores, and says what came out of each."""

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from published.commands import missing, rows_of
from published.compare import compare
from published.machine import machine
from published.measurements import RERUN, Measurement, Published
from published.tables import figures

SLOWEST = 10  # times the expected seconds after which a measurement is stopped
SHORTEST_LIMIT_SECONDS = 300.0


def rerun(
    published: Published, folder: Path, kinds: Sequence[str] | None = None, only: Sequence[str] | None = None
) -> int:
    """Reruns and compares, and prints what comes out.

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
    everything = published.measurements.values()
    wanted = [one for one in everything if one.is_rerun and one.rerun in (kinds or RERUN)]
    wanted = [one for one in wanted if one.name in (only or [one.name])]
    if lost := set(only or []) - {one.name for one in wanted}:
        known = ", ".join(one.name for one in everything if one.is_rerun)
        raise ValueError(
            f"no measurement that is rerun by this command: {', '.join(sorted(lost))}; there are {known}"
        )
    start = time.monotonic()
    # The longest first, so that the others fill the gaps.
    wanted.sort(key=lambda one: -one.rerun_seconds)
    with ThreadPoolExecutor(max(1, min(2, os.cpu_count() or 1))) as pool:
        outcomes = list(pool.map(partial(_one, published, folder), wanted))
    total = sum(len(figures(published, one)) for one in everything)
    compared = sum(number for number, _ in outcomes)
    print(f"{total} published figures, {compared} compared; {time.monotonic() - start:.0f} s")
    return int(any(differs for _, differs in outcomes))


def _one(published: Published, folder: Path, measurement: Measurement) -> tuple[int, bool]:
    """Reruns a measurement and prints what became of it: how many figures were compared, and whether it differs or fails."""
    shown, name = figures(published, measurement), measurement.name
    recorded_at = measurement.record.get("machine", {}).get("class", "no machine")
    here = machine()["class"]
    tolerance = "exact" if here == recorded_at else measurement.elsewhere
    skipped = "" if tolerance else f"recorded on {recorded_at}; on {here} other digits are right as well"
    if skipped := missing(measurement) or skipped:
        print(f"{name}: skipped: {skipped}", flush=True)
        return 0, False
    limit = max(SHORTEST_LIMIT_SECONDS, SLOWEST * measurement.rerun_seconds)
    try:
        command = measurement.rerun_command or measurement.command
        rows, seconds = rows_of(measurement, command, folder / name, limit)
    except (RuntimeError, ValueError) as error:
        print(f"{name}: FAILED: {error}", flush=True)
        return 0, True
    compared, differences = compare(measurement, shown, rows, tolerance)
    told = f"{compared} of {len(shown)} figures compared, {seconds:.0f} s of about {measurement.rerun_seconds:.0f}"
    print("\n  ".join([f"{name}: {'DIFFERS' if differences else 'same'}: {told}", *differences]), flush=True)
    return compared, bool(differences)
