"""Parts of a report's section, before they become HTML: charts, tables and texts.

``kind`` is for the page's template; nobody sets it.
"""

from typing import Any, NamedTuple

from matplotlib.figure import Figure


class Chart(NamedTuple):
    """Figure with the numbers that it shows.

    Attributes:
        name: names its files, ``[a-z0-9_]``; once on a page.
        title: short, without a full stop.
        caption: what is drawn and how it was summed up; what was left out.
        alt: the figure in words, for who cannot see it.
        figure: drawn on transparent ground; colours of `fedlight.report.figures.style` are made to fit the page's theme.
        rows: what was drawn, the same keys in each; becomes the CSV file.
        narrow: the same for a phone, where the figure is so wide that its texts would be too small there.
    """

    name: str
    title: str
    caption: str
    alt: str
    figure: Figure
    rows: list[dict[str, Any]]
    narrow: Figure | None = None
    kind: str = "chart"


class Table(NamedTuple):
    """Texts in lines and columns, ready to be read; the first column names the line.

    Attributes:
        title: short; may be empty.
        header: a name for each column.
        lines: texts, as many as the header has.
        caption: what the numbers are.
        marked: lines to point out, by position.
        folded: whether it is shown only when it is asked for.
    """

    title: str
    header: list[str]
    lines: list[list[str]]
    caption: str = ""
    marked: frozenset[int] = frozenset()
    folded: bool = False
    kind: str = "table"


class Answer(NamedTuple):
    """Answer of one method.

    Attributes:
        method: whose answer.
        text: as it was written; nothing in it is ever read as HTML.
        note: what a judge or task noted, such as ``score 1``.
    """

    method: str
    text: str
    note: str = ""


class Example(NamedTuple):
    """Prompt with the answers to it."""

    prompt: str
    answers: list[Answer]


class Texts(NamedTuple):
    """Answers of several methods beside each other.

    Attributes:
        title: short.
        examples: the same methods in each, in the same order, where they have answered.
        caption: where they come from and how they were chosen.
    """

    title: str
    examples: list[Example]
    caption: str = ""
    kind: str = "texts"


class Code(NamedTuple):
    """File shown as it is, folded."""

    title: str
    text: str
    kind: str = "code"


Part = Chart | Table | Texts | Code


class Section(NamedTuple):
    """Heading of the page, with what stands below it.

    Attributes:
        name: the anchor, ``[a-z0-9_]``; once on a page.
        title: the heading.
        intro: a sentence or two on what is to be seen, or an empty text.
        parts: in order.
        notes: one line for each thing that could not be shown, and why.
    """

    name: str
    title: str
    intro: str
    parts: list[Part]
    notes: tuple[str, ...] = ()
