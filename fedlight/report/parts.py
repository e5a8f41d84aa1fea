"""Parts of a report's section before they become HTML; each one's ``kind`` is for the page's template alone."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from matplotlib.figure import Figure


class Chart(NamedTuple):
    """Figure with the numbers that it shows."""

    name: str  # of its files, ``[a-z0-9_]``; once on a page
    title: str  # short, without a full stop
    caption: str  # what is drawn and how it was summed up; what was left out
    alt: str  # the figure in words, for who cannot see it
    figure: (
        Figure  # on transparent ground; the page's theme replaces `fedlight.report.figures.style`'s colours
    )
    rows: list[dict[str, Any]]  # what was drawn, the same keys in each; becomes the CSV file
    narrow: Figure | None = None  # for a phone, where texts of a wide figure would be too small
    kind: str = "chart"


class Table(NamedTuple):
    """Texts in lines and columns, ready to be read; the first column names the line."""

    title: str  # short; may be empty
    header: list[str]
    lines: list[list[str]]  # texts, as many as the header has
    caption: str = ""  # what the numbers are
    marked: frozenset[int] = frozenset()  # lines to point out, by position
    folded: bool = False  # whether it is shown only when it is asked for
    first: int | None = None  # lines that are shown before the others are asked for; None: all
    kind: str = "table"


def table_of(
    title: str, lines: Iterable[Mapping[str, str]], caption: str = "", folded: bool = False
) -> Table:
    """Return a table of lines that name their columns; a dash where a line has none.

    Examples:
        >>> table_of("", [{"run": "a", "rows": "2"}, {"run": "b"}]).lines
        [['a', '2'], ['b', '-']]
    """
    cells = [*lines]
    header = list(dict.fromkeys(name for line in cells for name in line))
    return Table(
        title, header, [[line.get(name, "-") for name in header] for line in cells], caption, folded=folded
    )


class Answer(NamedTuple):
    """Answer of one method."""

    method: str
    text: str  # as it was written; nothing in it is ever read as HTML
    note: str = ""  # what a judge or task noted, such as ``score 1``


class Example(NamedTuple):
    """Prompt with the answers to it."""

    prompt: str
    answers: list[Answer]


class Texts(NamedTuple):
    """Answers of several methods beside each other."""

    title: str
    examples: list[Example]  # the same methods in each, in the same order, where they have answered
    caption: str = ""  # where they come from and how they were chosen
    kind: str = "texts"


class Code(NamedTuple):
    """File shown as it is, folded."""

    title: str
    text: str
    kind: str = "code"


Part = Chart | Table | Texts | Code


class Section(NamedTuple):
    """Heading of the page, with its parts in order."""

    name: str  # the anchor, ``[a-z0-9_]``; once on a page
    title: str
    intro: str  # a sentence or two on what is to be seen; may be empty
    parts: list[Part]
    notes: tuple[str, ...] = ()  # one line for each thing that could not be shown, and why
