"""Writes the rows of a measurement: ``docs/results/NAME.json``."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from published.commands import RESULTS, missing, read_rows, rows_of
from published.machine import commit as checked_out
from published.machine import machine, versions
from published.measurements import RECORDS, ROOT, Published


def record(published: Published, name: str, place: Path | None = None, commit: str | None = None) -> Path:
    """Runs a measurement, or takes the rows that a run has left, and writes its record.

    Args:
        published: what there is.
        name: of the measurement.
        place: a run's folder or a JSON file, which a machine of this class has written; the command is run if not given.
        commit: of the program that made the rows; the one that is checked out if not given.

    Returns:
        Where it was written.

    Raises:
        ValueError: there is no such measurement, its data are missing, or code has been changed since the commit.
        RuntimeError: the command fails.
    """
    if name not in published.measurements:
        known = ", ".join(published.measurements)
        raise ValueError(f"docs/results.toml has no measurement {name!r}; it has {known}")
    measurement = published.measurements[name]
    made_by = commit or checked_out()
    entry: dict[str, Any] = {"command": measurement.command, "commit": made_by}
    entry |= {"date": datetime.now(UTC).date().isoformat(), "machine": machine(), "versions": versions()}
    if place is None:
        if lost := missing(measurement):
            raise ValueError(f"measurements.{name}: {lost}")
        rows, seconds = rows_of(measurement, measurement.command, ROOT / "build" / "record" / name)
        entry["seconds"] = round(seconds, 1)
    else:
        rows = read_rows(measurement, place)
        file = place / RESULTS if place.is_dir() else place
        ended = (file if file.is_file() else place).stat().st_mtime
        told = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        entry |= {key: told[key] for key in ("seconds", "versions") if key in told}
        entry["date"] = datetime.fromtimestamp(ended, UTC).date().isoformat()
    file = RECORDS / f"{name}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(text({**entry, "rows": rows}), encoding="utf-8")
    print(f"written: {file.relative_to(ROOT)}, {len(rows)} rows")
    return file


def text(content: dict[str, Any]) -> str:
    """JSON with one row on a line, so that a change of a figure is one line of a diff."""
    rows = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in content["rows"])
    head = [f' "{key}": {json.dumps(value)}' for key, value in content.items() if key != "rows"]
    return ",\n".join(["{\n" + head[0], *head[1:], f' "rows": [\n  {rows}\n ]\n}}\n'])
