"""The tables of the pages, written from the records between the lines ``<!-- table: NAME -->`` and ``<!-- end -->``."""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from published import papers
from published.figures import Figure, filled
from published.measurements import RERUN, ROOT, Measurement, Published

RESULTS = (
    "docs/results.md",
    *(f"docs/results/{name}.md" for name in ("fedbiscuit", "feddca", "fewfedpit", "system")),
)
PAGES = (*RESULTS, "README.md")
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->\n)", re.DOTALL)
AS_ABOVE = "*The same run as the table above.*"


def table(published: Published, name: str) -> tuple[str, list[Figure]]:
    """A table in Markdown, under it a line for each of its measurements, and its figures.

    Raises:
        ValueError: there is no such table, or a field of it means nothing.
    """
    own, told = _told(published, name)
    try:
        text, figures = _template(published, own, told) if "template" in told else _grid(published, own, told)
    except ValueError as error:
        raise ValueError(f"docs/results.toml: table {name}: {error}") from None
    makers = (
        {own.name: own, **{figure.measurement.name: figure.measurement for figure in figures}} if own else {}
    )
    return "\n\n".join([text, *map(caption, makers.values())]), figures


def _told(published: Published, name: str) -> tuple[Measurement | None, Mapping[str, Any]]:
    for measurement in published.measurements.values():
        if name in measurement.tables:
            return measurement, measurement.tables[name]
    if name in published.tables:
        return None, published.tables[name]
    raise ValueError(f"docs/results.toml has no table {name!r}")


def _grid(published: Published, own: Measurement | None, told: Mapping[str, Any]) -> tuple[str, list[Figure]]:
    """One line for each of ``rows`` (the words that tell them -> the printed ones), a cell for each of ``columns``."""
    if own is None:
        raise ValueError("a table of several measurements needs a `template`")
    columns: Mapping[str, str] = told["columns"]
    rows = told.get("rows") or {str(row[own.key[-1]]): str(row[own.key[-1]]) for row in own.rows}
    figures: list[Figure] = []
    lines = [[told.get("head", own.key[-1]), *columns], ["---"] * (len(columns) + 1)]
    for words, label in rows.items():
        cells = []
        for cell in columns.values():
            text, found = filled(cell, published.measurements, own, [*told.get("where", []), *_words(words)])
            cells.append(text)
            figures += found
        lines.append([label, *cells])
    return "\n".join(_line(cells) for cells in lines), figures


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(";")]


def _line(cells: list[str]) -> str:
    return f"|{'|'.join(cells)}|" if cells[0] == "---" else f"| {' | '.join(cells)} |"


def _template(
    published: Published, own: Measurement | None, told: Mapping[str, Any]
) -> tuple[str, list[Figure]]:
    text, figures = filled(told["template"].strip("\n"), published.measurements, own, told.get("where", []))
    if not text:
        raise ValueError("a field of its `template` has no figure: leave the cell empty instead")
    return text, figures


def caption(measurement: Measurement) -> str:
    """The line under a table: the command, the place and time of the record, and who reruns it."""
    record = measurement.record
    seeds = sorted({row["seed"] for row in measurement.rows if "seed" in row})
    words = [f"`{measurement.command.replace('{shared}', '$FEDLIGHT_SHARED')}`"]
    words += [f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"] if seeds else []
    if measurement.is_transcribed:
        words += [f"copied from the page of commit {record['commit']}"]
    else:
        words += [f"commit {record['commit']}", record["date"], record["machine"]["class"]]
    guard = RERUN[measurement.rerun]
    if measurement.why:
        guard += f": {measurement.why}"
    elif measurement.rerun_command:
        guard += f" as `{measurement.rerun_command.replace('{shared}', '$FEDLIGHT_SHARED')}`"
    return f"*{'; '.join(words)}; {guard}.*"


def rendered(text: str, published: Published) -> str:
    """A page with its tables written anew; a caption that the table before it has is not written again."""
    before = ""

    def written(found: re.Match[str]) -> str:
        nonlocal before
        lines, gap, told = table(published, found[2])[0].partition("\n\n")
        same, before = told == before, told
        return f"{found[1]}\n{lines}{gap}{AS_ABOVE if gap and same else told}\n\n{found[3]}"

    return BLOCK.sub(written, text)


def pages(published: Published) -> Iterator[tuple[Path, str, str]]:
    """Each page that is written from records: its file, its text, and the text that it should have."""
    for name in PAGES:
        text = (ROOT / name).read_text(encoding="utf-8")
        yield ROOT / name, text, rendered(text, published)
    yield papers.PAGE, papers.PAGE.read_text(encoding="utf-8") if papers.PAGE.exists() else "", papers.page()


def said(published: Published, measurement: Measurement) -> list[Figure]:
    """Figures that only the prose of its section has: those of its ``said``, where ``*`` stands for all that it has.

    Raises:
        ValueError: a field means nothing.
    """
    if measurement.said == ("*",):
        places = [(row, column) for row, of in enumerate(measurement.rows) for column in of]
        return [
            Figure(measurement, column, (row,), "")
            for row, column in places
            if column not in (*measurement.key, "seed")
        ]
    try:
        return [
            figure
            for text in measurement.said
            for figure in filled(text, published.measurements, measurement)[1]
        ]
    except ValueError as error:
        raise ValueError(f"docs/results.toml: measurements.{measurement.name}: said: {error}") from None


@cache
def _by_measurement(published: Published) -> Mapping[str, list[Figure]]:
    """All figures of the tables and of the prose, as often as they are there."""
    names = [*published.tables, *(name for one in published.measurements.values() for name in one.tables)]
    shown = [figure for name in names for figure in table(published, name)[1]]
    shown += [figure for one in published.measurements.values() for figure in said(published, one)]
    found = [side for figure in shown for side in figure.sides]
    own: dict[str, list[Figure]] = {name: [] for name in published.measurements}
    for figure in found:
        own[figure.measurement.name].append(figure)
    return own


def figures(published: Published, measurement: Measurement) -> list[Figure]:
    """All published figures of a measurement, each once, in the printed form with the most digits."""
    found_once: dict[tuple[str, tuple[int, ...]], Figure] = {}
    for figure in _by_measurement(published)[measurement.name]:
        other = found_once.setdefault((figure.column, figure.rows), figure)
        if figure.unit < other.unit:
            found_once[figure.column, figure.rows] = figure
    return list(found_once.values())
