"""Page of a report: the sections in one HTML file, each figure and its numbers in a folder beside it.

Matplotlib writes hex colours, ids that repeat from figure to figure, and a style sheet that would hold for the whole page.
Here colours of `fedlight.report.figures.style` become CSS variables, greys mixtures of ink and paper, ids get a prefix,
and the page's script can pick out an artist whose gid is ``series:NAME``.
"""

import base64
import hashlib
import io
import json
import os
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from html import escape
from itertools import chain, count
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from fedlight.report.figures.style import COLORS, STYLE
from fedlight.report.parts import Chart, Section
from fedlight.report.sections import (
    answers,
    client_data,
    coverage,
    curves,
    devices,
    groups,
    leakage,
    overview,
)
from fedlight.report.sections.outcomes import comparison, tasks
from fedlight.report.sections.outcomes.answer import answer
from fedlight.runs.run import Run, read_runs
from fedlight.support.files import csv_text, full_disk_named, read_text, unfinished, whole_file

SECTIONS: dict[str, Callable[[Sequence[Run]], Section | None]] = {
    "overview": overview.section,
    "comparison": comparison.section,
    "curves": curves.section,
    "answers": answers.section,
    "virtual_time": curves.time_section,
    "clients": client_data.spread_section,
    "client_data": client_data.section,
    "devices": devices.section,
    "groups": groups.section,
    "opinions": groups.opinions_section,
    "coverage": coverage.section,
    "leakage": leakage.section,
    "tasks": tasks.section,
    "configuration": overview.configuration_section,
}
"""Name -> what makes the section, None where no run has anything of it; in the order of the page."""
FILES = Path(__file__).parent / "page_files"
EMBEDDED = 24_000  # bytes of the largest CSV file that is embedded in the page
DPI = 120
ACROSS = 2
"""Charts in a row of the page."""


class Drawn(NamedTuple):
    """Figure as the template needs it."""

    svg: str
    narrow: str  # for a phone; may be empty
    csv: str  # the file as an URL of its data where it is small, else of the file
    width: int


def write_report(
    folders: Sequence[str | Path], output: str | Path | None = None, private: bool = False
) -> Path:
    """Write the page about all runs in the given folders, and return its path.

    Args:
        folders: of Lightning commands or recipes, finished or not.
        output: the page, ``.html``; None: ``report.html`` in the folder, or here where there are several. Beside it
            ``NAME_files/`` gets a PNG and a CSV file for each figure; those of an earlier page go.
        private: whether clients' own rows may be shown.

    Raises:
        ValueError: a folder holds no run; the output is no HTML file, or is in the way.
    """
    page = page_of(folders, output)
    runs = read_runs(folders, private)
    files = page.with_name(f"{page.stem}_files")
    drawn: dict[str, Drawn] = {}
    with full_disk_named(page), unfinished(files, is_folder=True) as new:
        figures = new / files.name  # as the page names the folder
        figures.mkdir()
        shown = [with_figures(section, figures, drawn) for section in sections(runs)]
        text = render(runs, shown, drawn, files.name)
        with whole_file(page) as whole:
            # Lone surrogates of a run's texts cannot be encoded.
            whole.write_text(text, encoding="utf-8", errors="replace")
            # The page gets its name when this block ends, so every figure that it names is there.
            files.mkdir(exist_ok=True)
            for file in figures.iterdir():
                os.replace(file, files / file.name)
            keep_only(files, [f"{name}.{kind}" for name in drawn for kind in ("png", "csv")])
    return page


def page_of(folders: Sequence[str | Path], output: str | Path | None) -> Path:
    """Return the file of the page, ``report.html`` unless it is given; raise ValueError where it cannot be one."""
    page = Path(output) if output else (Path(folders[0]) if len(folders) == 1 else Path()) / "report.html"
    if page.suffix not in (".html", ".htm"):
        raise ValueError(f"--output={page} is no name of a page: let it end with .html")
    if page.is_dir():
        raise ValueError(f"--output={page} is a folder: give the name of a file")
    files = page.with_name(f"{page.stem}_files")
    if files.exists() and not files.is_dir():
        raise ValueError(f"--output={page}: figures go to {files}, where a file is: give another name")
    return page


def sections(runs: Sequence[Run]) -> list[Section]:
    """Return the sections about the runs, a picture first; one that fails becomes a line with the error."""
    shown: list[Section] = []
    for name, make in SECTIONS.items():
        try:
            section = make(runs)
        # Whatever a damaged file has led to: the page is for those who look for the reason.
        except Exception as error:
            note = _failed("This section", error)
            section = Section(name, name.replace("_", " ").capitalize(), "", [], (note,))
        if section is not None:
            shown.append(section)
    return picture_first(shown)


def picture_first(shown: Sequence[Section]) -> list[Section]:
    """Return the sections with a picture in the first one: its own, else the first charts of curves or clients."""
    first, *others = shown
    if any(isinstance(part, Chart) for part in first.parts):
        return [first, *others]
    for section in (other for other in others if other.name in ("curves", "clients")):
        if charts := [part for part in section.parts if isinstance(part, Chart)][:ACROSS]:
            rest = section._replace(parts=[part for part in section.parts if part not in charts])
            others = [rest if other is section else other for other in others]
            first = first._replace(parts=[*charts, *first.parts])
            return [first, *(other for other in others if other.parts or other.notes)]
    return [first, *others]


def with_figures(section: Section, files: Path, drawn: dict[str, Drawn]) -> Section:
    """Draw the charts of a section into ``drawn``; one that cannot be drawn becomes a note."""
    kept, notes = [], list(section.notes)
    for part in section.parts:
        if isinstance(part, Chart):
            # Labels of runs that differ in other characters give the same name.
            names = chain([part.name], (f"{part.name}_{n}" for n in count(2)))
            part = part._replace(name=next(name for name in names if name not in drawn))
            try:
                drawn[part.name] = draw(part, files)
            except OSError:
                raise  # a full disk, a folder that cannot be written to: no fault of the chart
            except Exception as error:  # numbers that nothing can be drawn of, such as 1e308
                notes.append(_failed(f"The figure of {part.title!r}", error))
                continue
        kept.append(part)
    return section._replace(parts=kept, notes=tuple(notes))


def _failed(what: str, error: Exception) -> str:
    if os.environ.get("FEDLIGHT_TRACEBACK"):  # for who looks for the cause
        raise error
    return f"{what} could not be made: {type(error).__name__}: {' '.join(str(error).split())}"


@matplotlib.rc_context(STYLE)
def draw(chart: Chart, files: Path) -> Drawn:
    """Write PNG and CSV of a chart, and return it with its SVG for the page."""
    png, table = files / f"{chart.name}.png", files / f"{chart.name}.csv"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # the browser has other fonts
        svg = inlined(chart.figure, chart.name, chart.alt)
        narrow = inlined(chart.narrow, f"{chart.name}-narrow", chart.alt) if chart.narrow else ""
        save_png(chart.figure, png)
    content = csv_text(chart.rows).encode()
    table.write_bytes(content)
    small = base64.b64encode(content).decode() if len(content) <= EMBEDDED else ""
    link = f"data:text/csv;base64,{small}" if small else f"{files.name}/{table.name}"
    return Drawn(svg, narrow, link, round(chart.figure.get_figwidth() * 72))


def save_png(figure: Figure, file: Path) -> None:
    """Write the figure on white, with the layout that it has."""
    figure.set_layout_engine("none")  # laid out anew, texts would stand elsewhere than on the page
    figure.set_dpi(DPI)
    figure.patch.set(facecolor="white", alpha=1)
    FigureCanvasAgg(figure).print_png(str(file))


def render(runs: Sequence[Run], shown: Sequence[Section], drawn: dict[str, Drawn], files: str) -> str:
    """Return the HTML text; figures are in the folder ``files`` beside it, and texts of a run's files are escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(FILES),
        autoescape=True,  # names and answers may hold HTML
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    try:
        sentence = answer(runs)
    except Exception as error:  # whatever a damaged file has led to, as for the sections
        sentence = _failed("The answer", error)
    style, script = ((FILES / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    # The page's policy lets this script run and no other, in case a text of the data holds one.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template("page.html").render(
        title=", ".join(dict.fromkeys(run.home.name for run in runs)),
        answer=sentence,
        made=datetime.now().strftime("%Y-%m-%d %H:%M"),
        sections=shown,
        drawn=drawn,
        files=files,
        faults=[f"{run.label}: {name} {what}" for run in runs for name, what in run.faults.items()],
        style=style,
        script=script,
        digest=digest,
    )


LISTING = "files.json"
OWN_NAME = re.compile(r"[a-z0-9_]+\.(png|csv)")  # no path: a damaged list must not remove files elsewhere


def keep_only(folder: Path, figures: Iterable[str]) -> None:
    """Remove figures that an earlier report has listed and this one does not have, and list those that it has."""
    wanted = sorted(figures)
    try:
        listed = [str(name) for name in json.loads(read_text(folder / LISTING))["figures"]]
    # Absent or damaged, with lists in lists without end.
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        listed = []
    for name in set(listed) - set(wanted):
        if OWN_NAME.fullmatch(name) and (file := folder / name).is_file():
            file.unlink()
    (folder / LISTING).write_text(json.dumps({"figures": wanted}, indent=1) + "\n", encoding="utf-8")


DECLARATIONS = re.compile(r"<\?xml.*?\?>|<!DOCTYPE.*?>|<metadata>.*?</metadata>|<style.*?</style>", re.DOTALL)
COLOR = re.compile(r"(?P<property>fill|stroke|stop-color): (?P<color>#[0-9a-f]{6})\b")
COORDINATES = re.compile(r'\b(?:d|x|y|points)="[^"]*"')
DECIMALS = re.compile(r"(\.\d\d)\d+")  # hundredths of a point are too small to be seen
FONT = re.compile(r"font: (?P<size>[\d.]+px)[^;\"]*")
VARIABLES = {color.lower(): f"var(--series-{place})" for place, color in enumerate(COLORS, start=1)}


def inlined(figure: Figure, name: str, alt: str) -> str:
    """Return the ``<svg>`` element of a figure, as wide as the page allows; ``name``, once on a page, prefixes its ids."""
    for patch in (figure.patch, *(axes.patch for axes in figure.axes)):
        patch.set_alpha(0)  # the page's own paper, light or dark, is the ground
    text = io.StringIO()
    # Texts, not outlines: in the page's font, and to be searched.
    with matplotlib.rc_context({**STYLE, "svg.fonttype": "none"}):
        FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None})  # savefig would draw it twice
    return themed(text.getvalue(), name, alt)


def themed(svg: str, name: str, alt: str) -> str:
    """Return matplotlib's SVG with the page's colours and with ids that are unique on the page.

    Examples:
        >>> themed('<svg><g id="a" style="fill: #0072b2; stroke: #808080"/></svg>', "x", "A dot")
        '<svg role="img" aria-label="A dot"><g id="x-a" style="fill: var(--series-1); stroke: var(--grey-50)"/></svg>'
    """
    svg = DECLARATIONS.sub("", svg).strip()
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)  # matplotlib repeats each text in one
    svg = re.sub(r'<g id="series:([^"]*)">', r'<g class="series" data-series="\1"><title>\1</title>', svg)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = COLOR.sub(lambda match: f"{match['property']}: {_variable(match['color'])}", svg)
    svg = FONT.sub(r"font-size: \g<size>", svg)
    svg = COORDINATES.sub(lambda match: DECIMALS.sub(r"\1", match[0]), svg)
    svg = re.sub(r"\n\s*", "\n", svg)  # no need of indentation on the page
    # Without its size, and with its view box, it fills the figure on the page.
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r"\1", svg)
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(alt)}"', 1)


def _variable(color: str) -> str:
    """Return the page's variable for greys and the figures' own colours, other colours as they are."""
    if color[1:3] == color[3:5] == color[5:7]:
        return f"var(--grey-{round(int(color[1:3], 16) / 255 * 20) * 5})"
    return VARIABLES.get(color, color)
