"""Rows of CSV files as text, and numbers of them."""

from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedlight.support.files import read_csv
from fedlight.support.words import number

Rows = list[dict[str, str]]


def merged(versions: Sequence[Rows]) -> Rows:
    """Merge the rows of a run that was begun several times: a later version replaces each column from where it began.

    Rows without a step, logged by a validation of the finished run, replace nothing.

    Examples:
        >>> first = [{"epoch": "0", "x": "1"}, {"epoch": "1", "x": "2"}]
        >>> merged([first, [{"epoch": "1", "x": "3"}]])
        [{'epoch': '0', 'x': '1'}, {'epoch': '1', 'x': '3'}]
        >>> merged([[{"epoch": "", "step": "4", "win_rate": "0.5"}], [{"epoch": "", "step": "8", "win_rate": "0.6"}]])
        [{'epoch': '', 'step': '4', 'win_rate': '0.5'}, {'epoch': '', 'step': '8', 'win_rate': '0.6'}]
    """
    versions = [
        _new_to(versions[:place], rows)
        if place and not any(number(row.get(name)) for row in rows for name in ("epoch", "step"))
        else rows
        for place, rows in enumerate(versions)
    ]
    kept: list[Rows] = []
    begun: dict[str, float] = {}
    for rows in reversed(versions):  # the latest first: earlier ones count up to its beginning
        kept.append([row for old in rows if _tells(row := _without(old, begun))])
        for row in rows:
            for column, value in row.items():
                if value and column not in ("epoch", "step"):
                    begun[column] = min(begun.get(column, float("inf")), _place(row))
    return [row for rows in reversed(kept) for row in rows]


def _place(row: dict[str, str]) -> float:
    """Return the step, which also rows without an epoch have, such as those of scores beside the training."""
    step = number(row.get("step"))
    return number(row.get("epoch")) or 0.0 if step is None else step


def _new_to(earlier: Sequence[Rows], rows: Rows) -> Rows:
    """Return the rows without columns that earlier versions have logged."""
    known = {column for version in earlier for row in version for column, value in row.items() if value}
    new = [{c: "" if c in known - {"epoch", "step"} else text for c, text in row.items()} for row in rows]
    return [row for row in new if _tells(row)]


def _without(row: dict[str, str], begun: dict[str, float]) -> dict[str, str]:
    place = _place(row)
    if all(place < first for first in begun.values()):
        return row
    return {column: "" if place >= begun.get(column, float("inf")) else text for column, text in row.items()}


def _tells(row: dict[str, str]) -> bool:
    return any(value for column, value in row.items() if column not in ("epoch", "step"))


def epochs_done(rows: Rows) -> list[float | None]:
    """Return for each row of a logger how many epochs have ended with it; None where it names neither epoch nor step.

    A value with a step alone, such as a win rate, comes after the epochs with earlier steps.

    Examples:
        >>> epochs_done([{"step": "0"}, {"epoch": "0", "step": "3"}, {"step": "4"}, {"epoch": "1", "step": "7"}, {"x": "1"}])
        [0.0, 1.0, 1.0, 2.0, None]
    """
    places = [(number(row.get("epoch")), number(row.get("step"))) for row in rows]
    last_steps: dict[float, float] = {}
    for epoch, step in places:
        if epoch is not None and step is not None:
            last_steps[epoch] = max(step, last_steps.get(epoch, step))
    epochs = sorted(last_steps)
    ends = [last_steps[epoch] for epoch in epochs]

    def ended(step: float) -> float:
        place = bisect_left(ends, step)
        return epochs[place - 1] + 1 if place else 0.0

    return [
        epoch + 1 if epoch is not None else None if step is None else ended(step) for epoch, step in places
    ]


def objects(value: Any) -> list[dict[str, Any]]:
    """Return the objects of a list; none where it is no list.

    Examples:
        >>> objects([{"x": 1}, 2]), objects(None)
        ([{'x': 1}], [])
    """
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


SYMBOLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n\r"} | {127: 0x2421}
"""Control character -> symbol that shows it."""


def text_can_hold(value: Any) -> Any:
    r"""Replace lone surrogates by ``?`` and control characters by symbols: no page and no figure takes them.

    Examples:
        >>> text_can_hold({"x": ["a", "\ud800b"], "y": "\x1b[31m"})
        {'x': ['a', '?b'], 'y': '␛[31m'}
    """
    if isinstance(value, str):
        return value.encode(errors="replace").decode().translate(SYMBOLS)
    if isinstance(value, dict):
        return {text_can_hold(name): text_can_hold(inner) for name, inner in value.items()}
    return [text_can_hold(inner) for inner in value] if isinstance(value, list) else value


def read_rows(file: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """Return the rows of a CSV file; raise ValueError for one that is absent, empty, or lacks a column."""
    remedy = "give a file that the callback has written in a whole run"
    if not file.is_file():
        raise ValueError(f"{file}: there is no such file: {remedy}")
    rows = [row for row in read_csv(file) if None not in row.values()]  # a killed run may leave half a row
    if not rows:
        raise ValueError(f"{file}: there is no row: {remedy}")
    if missing := [column for column in columns if column not in rows[0]]:
        raise ValueError(f"{file}: there is no column {missing[0]!r} among {', '.join(rows[0])}: {remedy}")
    return rows
