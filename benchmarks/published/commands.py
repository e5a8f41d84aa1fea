"""Runs a measurement's command in a separate process and reads the rows that it leaves."""

import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from published.machine import THREADS
from published.measurements import ROOT, Measurement, Row, flat, identity

RESULTS = "results.json"


def missing(measurement: Measurement) -> str:
    """Which of the data that it needs are not there, empty if all are."""
    shared = os.environ.get("FEDLIGHT_SHARED", "")
    lost = [name for name in measurement.needs if not shared or not (Path(shared) / name).exists()]
    return f"FEDLIGHT_SHARED names no folder with {', '.join(lost)}" if lost else ""


def rows_of(
    measurement: Measurement, command: str, folder: Path, limit_seconds: float | None = None
) -> tuple[list[Row], float]:
    """Runs a command and gives its rows, and the seconds that it took.

    Args:
        measurement: whose rows they are.
        command: ``fedlight run NAME ...``, whose results are read, or ``python benchmarks/NAME.py ...``, which is to
            write them with ``--json``.
        folder: made anew; the command runs in it and prints into ``log.txt`` there.
        limit_seconds: after which it is stopped.

    Raises:
        ValueError: it is no such command.
        RuntimeError: it fails or takes too long.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    start = time.monotonic()
    log = folder / "log.txt"
    with log.open("w") as file:
        try:
            done = subprocess.run(
                arguments(command, folder),
                cwd=folder,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=limit_seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{command} took more than {limit_seconds:.0f} s; see {log}") from None
    if done.returncode:
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise RuntimeError(f"{command} ends with {done.returncode} ({' '.join(last)}); see {log}")
    seconds = time.monotonic() - start
    return read_rows(measurement, folder), seconds


def arguments(command: str, folder: Path) -> Sequence[str]:
    """The command with this Python, absolute paths, and where its rows go."""
    words = shlex.split(command.replace("{shared}", os.environ.get("FEDLIGHT_SHARED", "")))
    match words:
        case ["fedlight", "run", *rest]:
            return [sys.executable, "-m", "fedlight", "run", *rest, "--output", str(folder)]
        case ["python", script, *rest] if (ROOT / script).is_file():
            return [sys.executable, str(ROOT / script), *rest, "--json", str(folder / RESULTS)]
    raise ValueError(
        f"{command!r} can not be rerun: write fedlight run NAME, or python benchmarks/NAME.py that knows --json"
    )


def read_rows(measurement: Measurement, place: Path) -> list[Row]:
    """The rows in a JSON file, or in ``results.json`` of a run's folder; maps are flattened.

    A run's rows are also those of its ``stages``; one of single stages has no ``results.json``.

    Raises:
        ValueError: there is no such file, there are no rows, or two of them have the same key and different values.
    """
    file = place / RESULTS if place.is_dir() else place
    found: Any = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
    rows = found.get("rows") if isinstance(found, dict) else found
    rows = [flat(row) for row in rows or []]
    if place.is_dir():
        rows += _rows_of_stages(measurement, place)
    if not rows:
        raise ValueError(f"{file}: there is no such file, or it has no rows")
    merged: dict[tuple[str, ...], Row] = {}
    for row in rows:
        if not any(column in row for column in measurement.key):
            continue  # of another table than the one whose rows are kept
        whole = merged.setdefault(identity(measurement, row), {})
        for column in row:
            if column in whole and not _same(whole[column], row[column]):
                raise ValueError(
                    f"{place}: two rows of {', '.join(identity(measurement, row))} differ in {column!r} "
                    f"({whole[column]} and {row[column]}): `key` has to tell them apart"
                )
        merged[identity(measurement, row)] = {**row, **whole}
    return list(merged.values())


def _same(one: Any, other: Any) -> bool:
    """Are they the same, where a stage's metric may have been rounded to fp32?"""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6) or (math.isnan(one) and math.isnan(other))
    return str(one) == str(other)


def _rows_of_stages(measurement: Measurement, run: Path) -> list[Row]:
    """One for each stage and seed that is done; a stage says by what name which of its metrics is known."""
    rows = []
    for name, told in measurement.stages.items():
        for file in sorted(run.glob(f"seed*/{name}/done.json")):
            metrics = json.loads(file.read_text(encoding="utf-8"))["result"]["metrics"]
            if lost := [of for key, of in told.items() if key not in measurement.key and of not in metrics]:
                raise ValueError(f"{file} has no metric {lost[0]!r}; it has {', '.join(metrics)}")
            row = {key: of if key in measurement.key else metrics[of] for key, of in told.items()}
            rows.append({**row, "seed": int(file.parents[1].name.removeprefix("seed"))})
    return rows
