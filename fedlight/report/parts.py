"""Parts of a report's section before they become HTML, and numbers and names as their texts.

Each part's ``kind`` is for the page's template alone.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, stdev
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from fedlight.support.files import result_of
from fedlight.support.words import number

MOST_SAID = 40
"""Lines, bars or points that the words of a figure name."""


class Chart(NamedTuple):
    """Figure with the numbers that it shows."""

    name: str  # of its files, ``[a-z0-9_]``; once on a page
    title: str  # short, without a full stop
    caption: str  # the drawn numbers, how they were summed up, and omissions
    figure: Figure  # on transparent ground; the page's theme replaces the colours of `figures.style`
    rows: list[dict[str, Any]]  # the drawn numbers, the same keys in each; becomes the CSV file
    narrow: Figure | None = None  # for a phone, where texts of a wide figure would be too small
    kind: str = "chart"

    @property
    def alt(self) -> str:
        """The figure in words, for who cannot see it: the last numbers of each line, bar or point, by its names."""
        last = {tuple(v for v in row.values() if isinstance(v, str)): row for row in self.rows}
        if len(last) > MOST_SAID:
            return f"{self.title}. The data have {len(self.rows):,} rows."
        texts = (
            f"{' '.join(filter(None, names))}: "
            + ", ".join(
                f"{name} {'-' if value is None else f'{value:,.4g}'}"
                for name, value in row.items()
                if not isinstance(value, str) and name not in ("low", "high", "seeds")
            )
            for names, row in last.items()
        )
        return f"{self.title}. {'; '.join(texts)}."


class Table(NamedTuple):
    """Texts in lines and columns, ready to be read; the first column names the line."""

    title: str  # short; may be empty
    header: list[str]
    lines: list[list[str]]  # texts, as many as the header has
    caption: str = ""  # the meaning of the numbers
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
    lines = [*lines]
    header = list(dict.fromkeys(name for line in lines for name in line))
    cells = [[line.get(name, "-") for name in header] for line in lines]
    return Table(title, header, cells, caption, folded=folded)


class Answer(NamedTuple):
    """Answer of one method."""

    method: str
    text: str  # as it was written; nothing in it is ever read as HTML
    note: str = ""  # by a judge or task, such as ``score 1``


class Texts(NamedTuple):
    """Answers of several methods beside each other."""

    title: str
    # Prompt and the answers to it: the same methods in each, in the same order, where they have answered.
    examples: list[tuple[str, list[Answer]]]
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
    intro: str  # a sentence or two on the parts; may be empty
    parts: list[Part]
    notes: tuple[str, ...] = ()  # one line for each thing that could not be shown, and why


def slug(text: str) -> str:
    """Return a text as part of a file's name.

    Examples:
        >>> slug("FedBiscuit, U = 3")
        'fedbiscuit_u_3'
    """
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_") or "x"


def shortened(text: str, most: int) -> str:
    """Return a text of at most so many characters.

    Examples:
        >>> shortened("FedBiscuit", 5), shortened("FedAvg", 6)
        ('FedB…', 'FedAvg')
    """
    return text if len(text) <= most else f"{text[: most - 1]}…"


def capitalized(text: str) -> str:
    """Return a text with a capital at its beginning, all else as it is.

    Examples:
        >>> capitalized("mean AUC")
        'Mean AUC'
    """
    return text[:1].upper() + text[1:]


def short(value: Any) -> str:
    """Return a number with three decimals or four digits; other values as text.

    Examples:
        >>> short(0.123456), short(12), short(1234567.0), short(None), short("x"), short(1.5e-05)
        ('0.123', '12', '1,234,567', '-', 'x', '1.5e-05')
    """
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):  # a bool is an int too
        return str(value)
    if isinstance(value, int) or (value.is_integer() and abs(value) >= 10):
        return f"{value:,.0f}"
    return f"{value:.3f}" if 0.001 <= abs(value) < 1000 or value == 0 else f"{value:.4g}"


def deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of a sample, 0 for a single value."""
    return stdev(values) if len(values) > 1 else 0.0


def points_of(tables: str | Sequence[str], x: str, y: str) -> dict[str, Any]:
    """Return two columns of the rows of stages: method -> ``x`` and ``y``, lists, without rows that lack one.

    Without a result or such a row a ValueError is raised.
    """
    folders = [tables] if isinstance(tables, str) else tables
    rows = [row for folder in folders for row in result_of(folder).get("rows", [])]
    points: dict[str, Any] = {}
    for row in rows:
        if row.get(x) is not None and row.get(y) is not None:
            point = points.setdefault(row["method"], {"x": [], "y": []})
            point["x"].append(row[x])
            point["y"].append(row[y])
    if not points:
        columns = ", ".join(dict.fromkeys(name for row in rows for name in row))
        raise ValueError(f"{', '.join(folders)}: no row has both {x!r} and {y!r}, but {columns}: set x and y")
    return points


def spread(values: Sequence[Any]) -> str:
    """Return mean ± standard deviation of numbers, texts as they are.

    Examples:
        >>> spread([0.5]), spread([1.0, 2.0]), spread(["x", "x"]), spread([])
        ('0.500', '1.500 ± 0.707', 'x', '-')
    """
    numbers = [x for value in values if not isinstance(value, bool) and (x := number(value)) is not None]
    if len(numbers) < len(values) or not numbers:
        return ", ".join(dict.fromkeys(short(value) for value in values)) or "-"
    if len(numbers) == 1:
        return short(values[0])
    return f"{short(mean(numbers))} ± {short(stdev(numbers))}"
