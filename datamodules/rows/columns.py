"""Column maps: where the rows of any data set have what fedlight asks for.

A column map says for every name that fedlight knows where a row has it; dots go into nested columns and lists:
``{"post": "info.post", "response_a": "summaries.0.text", "choice": "choice", "client": "worker"}``.

Names with a meaning: ``response_a``, ``response_b`` and ``choice``, or ``chosen`` and ``rejected``; ``score_a``
and ``score_b`` (the choice is tested against them); ``client``; ``category``; ``group``, a known group of the
client, with which evaluation compares what an algorithm finds and which no model sees. Every other name is a slot of
the template.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fedlight.datamodules.rows.rows import RowsError
from fedlight.support.types import Rows

Columns = Mapping[str, str]


def value_at(row: Any, path: str) -> Any:
    """Follows a dotted path; numbers index lists, negative ones from the end.

    Raises:
        KeyError, IndexError, TypeError, ValueError: there is nothing at the path.

    Example:
        >>> value_at({"summaries": [{"text": "s0"}, {"text": "s1"}]}, "summaries.1.text")
        's1'
    """
    if isinstance(row, Mapping) and path in row:
        return row[path]  # a column whose own name has dots
    for key in path.split("."):
        row = row[int(key)] if isinstance(row, Sequence) and not isinstance(row, str) else row[key]
    return row


def check_columns(rows: Rows, columns: Columns, source: str, setting: str = "columns") -> None:
    """Every mapped column must exist in the first row; later rows may lack it (counted as missing).

    Args:
        rows: at least one.
        columns: name to column.
        source: of the rows, for the message.
        setting: that gave the columns, likewise.

    Raises:
        RowsError: names the column, the source and the columns that exist.
    """
    for name, path in columns.items():
        try:
            value_at(rows[0], path)
        except (KeyError, IndexError, TypeError, ValueError):
            existing = ", ".join(_paths(rows[0]))
            raise RowsError(
                f"{source}: no column {path!r} (mapped to {name!r}). The columns are: {existing}. Set "
                f"{setting}.{name} to one of them."
            ) from None


def text_at(row: Mapping[str, Any], path: str) -> str:
    """The text at a path, stripped; "" where there is none.

    A list (the turns of a conversation) is joined by blank lines; see `well_formed` for what is mended.
    """
    try:
        value = value_at(row, path)
    except (KeyError, IndexError, TypeError, ValueError):
        return ""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return well_formed("\n\n".join(str(part).strip() for part in value))
    return "" if value is None else well_formed(str(value).strip())


def well_formed(text: str) -> str:
    r"""The text with half characters replaced, which neither tokenizers nor files take.

    JSON can hold them: who cuts a text off between the two halves of a character writes such a one.

    Example:
        >>> well_formed("cut \ud83d") == "cut \ufffd", well_formed("\ud83d\ude00") == "\U0001f600"
        (True, True)
    """
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _paths(row: Mapping[str, Any]) -> list[str]:
    """Existing columns, nested ones with dots."""
    paths: list[str] = []
    for name, value in row.items():
        paths += (
            [f"{name}.{inner}" for inner in _paths(value)]
            if isinstance(value, Mapping) and value
            else [str(name)]
        )
    return paths
