"""Numbers and names as texts of a page."""

import re
from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any

from fedlight.runs.rows import number
from fedlight.support.files import result_of


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
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or (value.is_integer() and abs(value) >= 10):
        return f"{value:,.0f}"
    return f"{value:.3f}" if 0.001 <= abs(value) < 1000 or value == 0 else f"{value:.4g}"


def deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of a sample, 0 for a single value."""
    return stdev(values) if len(values) > 1 else 0.0


def points_of(tables: str | Sequence[str], x: str, y: str, label: str = "method") -> dict[str, Any]:
    """Return two columns of the rows that stages have returned: name -> ``x`` and ``y``, lists, without rows that lack one.

    Args:
        tables: folders of stages whose result has ``rows``, one or several (one for each seed).
        x: a column.
        y: another.
        label: column with the names.

    Raises:
        ValueError: a folder has no result, or no row has both columns.
    """
    folders = [tables] if isinstance(tables, str) else tables
    rows = [row for folder in folders for row in result_of(folder).get("rows", [])]
    whole = [row for row in rows if row.get(x) is not None and row.get(y) is not None]
    if not whole:
        columns = ", ".join(dict.fromkeys(name for row in rows for name in row))
        raise ValueError(f"{', '.join(folders)}: no row has both {x!r} and {y!r}, but {columns}: set x and y")
    return {
        name: {
            side: [row[column] for row in whole if row[label] == name]
            for side, column in (("x", x), ("y", y))
        }
        for name in dict.fromkeys(row[label] for row in whole)
    }


def spread(values: Sequence[Any]) -> str:
    """Return mean ± standard deviation of numbers, texts as they are.

    Examples:
        >>> spread([0.5]), spread([1.0, 2.0]), spread(["x", "x"]), spread([])
        ('0.500', '1.500 ± 0.707', 'x', '-')
    """
    numbers = [
        found for value in values if not isinstance(value, bool) and (found := number(value)) is not None
    ]
    if len(numbers) < len(values) or not numbers:
        return ", ".join(dict.fromkeys(short(value) for value in values)) or "-"
    if len(numbers) == 1:
        return short(values[0])
    return f"{short(mean(numbers))} ± {short(stdev(numbers))}"


def duration(seconds: float) -> str:
    """Return a time in its two largest units.

    Examples:
        >>> duration(3.21), duration(95), duration(7260)
        ('3.2 s', '1 min 35 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
