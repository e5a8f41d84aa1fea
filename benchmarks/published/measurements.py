"""What ``docs/results.toml`` says of each measurement, and the rows that were recorded of it."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TOML = ROOT / "docs" / "results.toml"
RECORDS = ROOT / "docs" / "results"
RERUN = {
    "check": "rerun by CI",
    "reproduce": "rerun by `make reproduce`",
    "test": "asserted by a test",
    "no": "not rerun",
}

Row = dict[str, Any]


@dataclass(frozen=True)
class Measurement:
    """One measurement: a command, and the figures that it has given.

    Attributes:
        name: of its record, ``docs/results/NAME.json``.
        section: its heading on a page of results, or another page.
        command: what makes all of its figures; ``{shared}`` is the folder with real data.
        rerun: ``check`` (by CI), ``reproduce`` (by ``make reproduce``), ``test`` (a test asserts it) or ``no``.
        why: why it is not rerun, or where the test is.
        rerun_command: a smaller command, whose rows are compared with those of the same keys and seeds.
        rerun_seconds: what that takes, about.
        key: columns that tell rows apart, besides ``seed``.
        needs: files that have to lie in the folder with real data.
        elsewhere: how far a rerun may be off on a machine of another class, see `published.compare`; without it figures are
            not compared there.
        tables: name -> how it is written, see `published.tables`.
        stages: of a recipe: stage -> a row of its metrics, each by its name in the rows, with the key of the row.
        said: fields of figures that the prose of the section alone has; ``*`` alone for all.
        record: the recorded ``rows``, and where and when they were made.
    """

    name: str
    section: str
    command: str
    rerun: str
    why: str = ""
    rerun_command: str = ""
    rerun_seconds: float = 0
    key: tuple[str, ...] = ("method",)
    needs: tuple[str, ...] = ()
    elsewhere: str = ""
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    stages: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    said: tuple[str, ...] = ()
    record: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ValueError where it contradicts itself."""
        at = f"docs/results.toml: measurements.{self.name}"
        if self.rerun not in RERUN:
            raise ValueError(f"{at}: rerun={self.rerun!r} is none of {', '.join(RERUN)}")
        if self.rerun in ("no", "test") and not self.why:
            raise ValueError(f"{at}: rerun={self.rerun!r} needs `why`: the reason, or the test")
        if self.is_rerun and not self.rerun_seconds:
            raise ValueError(f"{at}: rerun={self.rerun!r} needs `rerun_seconds`: about what it takes")
        if self.is_rerun and "{shared}" in (self.rerun_command or self.command) and not self.needs:
            raise ValueError(f"{at}: a command with {{shared}} needs `needs`: the files that it reads there")

    @property
    def rows(self) -> list[Row]:
        """As they were recorded, one for each key and seed."""
        return list(self.record["rows"])

    @property
    def is_rerun(self) -> bool:
        """Does ``make reproduce`` rerun it?"""
        return self.rerun in ("check", "reproduce")

    @property
    def is_transcribed(self) -> bool:
        """Was it copied from a page, since nothing else was left of it?"""
        return bool(self.record.get("transcribed"))


@dataclass(frozen=True, eq=False)
class Published:
    """All of ``docs/results.toml``.

    Attributes:
        measurements: by name.
        tables: those with figures of several measurements, by name.
        pages: page -> ``settings``, numbers in its prose that are no measured figures; of ``results`` by section.
    """

    measurements: Mapping[str, Measurement]
    tables: Mapping[str, Mapping[str, Any]]
    pages: Mapping[str, Mapping[str, Any]]


def load(toml: Path = TOML, records: Path = RECORDS) -> Published:
    """Reads all of it.

    Raises:
        ValueError: a measurement has no record or a record no measurement, or an entry contradicts itself.
    """
    told = tomllib.loads(toml.read_text(encoding="utf-8"))
    entries = told.get("measurements", {})
    recorded = {file.stem for file in records.glob("*.json")}
    if lost := sorted(recorded - set(entries)):
        raise ValueError(
            f"{toml}: no measurement has the record {records / lost[0]}.json: delete it, or add one"
        )
    measurements = {}
    for name, entry in entries.items():
        lists = {key: tuple(entry[key]) for key in ("key", "needs", "said") if key in entry}
        file = records / f"{name}.json"
        record = json.loads(file.read_text(encoding="utf-8")) if name in recorded else {"rows": []}
        try:
            measurements[name] = Measurement(name, **{**entry, **lists}, record=record)
        except TypeError as error:
            raise ValueError(f"{toml}: measurements.{name}: {error}") from None
    return Published(measurements, told.get("tables", {}), told.get("pages", {}))


def flat(row: Mapping[str, Any], prefix: str = "") -> Row:
    """A row whose values are single ones.

    Example:
        >>> flat({"a": 1, "ratios": {"b": 2.0}})
        {'a': 1, 'ratios/b': 2.0}
    """
    found: Row = {}
    for name, value in row.items():
        found |= flat(value, f"{prefix}{name}/") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def identity(measurement: Measurement, row: Mapping[str, Any]) -> tuple[str, ...]:
    """What tells a row from the others of a measurement."""
    return tuple(str(row.get(column)) for column in (*measurement.key, "seed"))
