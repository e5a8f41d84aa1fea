"""Data checks: can every data set be read, with the splits and columns that the settings name?"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedlight.datamodules.rows.columns import check_columns
from fedlight.datamodules.rows.rows import ENDINGS, HUB_NAME, RowsError, load_rows
from fedlight.preflight.columns import Shape, read_shape
from fedlight.preflight.finding import Finding, ok, problem, unknown
from fedlight.preflight.hub import Hub, HubUnreachableError, Repository
from fedlight.support.needs import RowSource


class RowsReport(NamedTuple):
    """Result of the checks of all data sets.

    Attributes:
        downloads: hub data set -> bytes to be fetched, as far as they are known.
        unasked: hub names that could not be looked up.
        counts: (source, split) -> number of rows, as far as it is known.
    """

    findings: list[Finding]
    downloads: dict[str, int]
    unasked: list[str]
    counts: dict[tuple[str, str], int]


def check_rows(wanted: Mapping[RowSource, Sequence[str]], hub: Hub, output: Path) -> RowsReport:
    """Check each source once for each split and set of columns; files in ``output`` are not read, as stages write them."""
    report = RowsReport([], {}, [], {})
    for rows in wanted:
        if Path(rows.source).is_relative_to(output):
            continue
        path = Path(rows.source).expanduser()
        if rows.source.startswith("toy:") or path.exists() or not _is_hub_name(rows.source):
            report.findings.append(_local(rows, report.counts))
        else:
            _at_hub(rows, hub, report)
    return report


def _is_hub_name(source: str) -> bool:
    return HUB_NAME.fullmatch(source) is not None and not source.endswith(ENDINGS)


def _local(rows: RowSource, counts: dict[tuple[str, str], int]) -> Finding:
    what = f"data {rows.source}"
    try:
        found = load_rows(rows.source, rows.split)
        check_columns(
            found, dict(rows.columns), rows.source, texts=False
        )  # a task's rows may hold lists of objects
    except (RowsError, ValueError, OSError) as error:
        return problem(what, str(error))
    counts[rows.source, rows.split] = len(found)
    return ok(what, f"{len(found):,} rows{_columns(rows)}")


def _columns(rows: RowSource) -> str:
    return f"; columns {', '.join(dict.fromkeys(path for _, path in rows.columns))}" if rows.columns else ""


def _at_hub(rows: RowSource, hub: Hub, report: RowsReport) -> None:
    name, _, config = rows.source.partition(":")
    what = f"data {rows.source}, {rows.split}"
    try:
        repository, shape = read_shape(hub, name, config, rows.split)
    except HubUnreachableError:
        cached = _cached(name)
        if cached is None:
            report.unasked.append(rows.source)
        else:
            report.findings.append(ok(what, f"in the cache, {cached}; its columns were not looked at"))
        return
    except ValueError as error:
        report.findings.append(problem(what, str(error)))
        return
    report.findings.append(_shape_finding(what, rows, repository, shape))
    count = shape.splits.get(rows.split)
    if count is not None:
        report.counts[rows.source, rows.split] = count
    if _cached(name) is None:
        report.downloads[rows.source] = shape.size or sum(repository.files.values())


def _shape_finding(what: str, rows: RowSource, repository: Repository, shape: Shape) -> Finding:
    splits = rows.split.split("+")
    if shape.splits and (
        missing := [split for split in splits if split.partition("[")[0] not in shape.splits]
    ):
        return problem(
            what,
            f"it has no split {missing[0]!r}; it has {', '.join(shape.splits)}: set split to one of them",
        )
    if shape.row is None:
        return unknown(what, "it exists, but its columns are not known without fetching it")
    try:
        check_columns([shape.row], dict(rows.columns), rows.source, texts=False)
    except RowsError as error:
        return problem(what, str(error).removeprefix(f"{rows.source}: "))
    counts = [shape.splits.get(split) for split in splits]
    known = [count for count in counts if count is not None]
    number = f"{sum(known):,} rows" if known and len(known) == len(counts) else "there"
    gated = "; gated, and there is access" if repository.gated else ""
    return ok(what, f"{number}{_columns(rows)}{_licensed(repository)}{gated}")


def _licensed(repository: Repository) -> str:
    return f"; license {repository.license}" if repository.license else "; its card names no license"


def _cached(name: str) -> str | None:
    """Return the folder where the package ``datasets`` has cached a data set; None where it has not."""
    import datasets

    folder = Path(datasets.config.HF_DATASETS_CACHE) / name.replace("/", "___").lower()
    other = Path(datasets.config.HF_DATASETS_CACHE) / name.replace("/", "___")
    found: list[Any] = [place for place in (folder, other) if place.is_dir() and any(place.rglob("*.arrow"))]
    return str(found[0]) if found else None
