"""Rows that a program has in memory: a list of mappings, or a table of pandas or of ``datasets``."""

from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NewType, Protocol, runtime_checkable

from fedlight.support.types import Rows

WANTED = "a list of mappings from column to value, a DataFrame of pandas, or a Dataset of datasets"


class RowsError(ValueError):
    """Error of a source of rows; the message names the source, the place in it and the remedy."""


def refuse_too_long(fitting: int, what: str, source: object, max_tokens: int) -> None:
    """Raise RowsError where none of a source's examples, ``what``, fits into ``max_tokens``."""
    if not fitting:
        raise RowsError(f"{source}: no {what} fits into max_tokens={max_tokens}: raise it")


@runtime_checkable
class Frame(Protocol):
    """Table of pandas, which fedlight does not import."""

    columns: Any

    def notna(self) -> Any:
        """Return the same table with True where a cell has a value."""

    def astype(self, dtype: type) -> Any:
        """Return the table with cells of another type."""


@dataclass(frozen=True, eq=False, repr=False)
class GivenRows:
    """Rows in memory, which messages name by their number.

    Examples:
        >>> print(GivenRows([{"prompt": "Hi"}, {"prompt": "Bye"}]))
        the 2 given rows
    """

    rows: Rows

    def __str__(self) -> str:
        number = len(self.rows)
        return f"the {number:,} given row{'s'[: number != 1]}"


if TYPE_CHECKING:
    Source = str | Path | GivenRows | Rows | Frame
else:
    # A config can hold a name alone; `name_source` checks the rows of a program.
    Source = NewType("Source", str)


def name_source(source: Source) -> str | GivenRows:
    """Return a source by its name, which may be a path, and rows in memory with a name for messages.

    A cell of a DataFrame without a value is None.

    Raises:
        RowsError: the rows are empty, or not mappings.

    Examples:
        >>> name_source("votes.jsonl"), str(name_source([{"prompt": "Hi"}]))
        ('votes.jsonl', 'the 1 given row')
        >>> name_source(["Hi"])
        Traceback (most recent call last):
        fedlight.datamodules.rows.given.RowsError: row 0 of the given rows is 'Hi': give a list of mappings from column to...
    """
    if isinstance(source, str | Path | GivenRows):
        return source if isinstance(source, GivenRows) else str(source)
    if isinstance(source, Frame):
        if not source.columns.is_unique:  # to_dict keeps one of them
            raise RowsError("two columns of the DataFrame have the same name: rename one of them")
        # As objects: a column of numbers would turn None back into NaN.
        source = source.astype(object).where(source.notna(), None).to_dict("records")
    if isinstance(source, Mapping) or not (isinstance(source, Sized) and isinstance(source, Iterable)):
        raise RowsError(f"source is a {type(source).__name__}: give the name of a file, {WANTED}")
    if not len(source):
        raise RowsError("the given rows are empty: give one row or more")
    # The rows of a Dataset are mappings, and reading them all takes long.
    for number, row in enumerate(islice(source, None if isinstance(source, Sequence) else 1)):
        if not isinstance(row, Mapping):
            raise RowsError(f"row {number} of the given rows is {row!r:.50}: give {WANTED}")
    return GivenRows(source)  # type: ignore[arg-type]
