"""Column maps from fedlight's names to the columns of any data set.

A column map gives the path of each name in a row; dots lead into nested columns and lists:
``{"post": "info.post", "response_a": "summaries.0.text", "choice": "choice", "client": "worker"}``.

Names with a meaning: ``response_a``, ``response_b`` and ``choice``, or ``chosen`` and ``rejected``; ``score_a`` and
``score_b``, against which the choice is checked; ``client``; ``category``; ``group``, a known group of the client, which
evaluation compares with what an algorithm finds and which no model sees. Every other name is a slot of the template.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fedlight.datamodules.rows.rows import RowsError
from fedlight.support.types import Rows

Columns = Mapping[str, str]


def value_at(row: Any, path: str) -> Any:
    """Return the value at a dotted path; numbers index lists, negative ones from the end.

    Raises:
        KeyError, IndexError, TypeError, ValueError: the path does not exist.

    Examples:
        >>> value_at({"summaries": [{"text": "s0"}, {"text": "s1"}]}, "summaries.1.text")
        's1'
    """
    if isinstance(row, Mapping) and path in row:
        return row[path]  # a column whose own name has dots
    for key in path.split("."):
        row = row[int(key)] if isinstance(row, Sequence) and not isinstance(row, str) else row[key]
    return row


def find_value(row: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path; None where the path does not exist."""
    try:
        return value_at(row, path)
    except (KeyError, IndexError, TypeError, ValueError):
        return None


def check_columns(rows: Rows, columns: Columns, source: str, setting: str = "columns") -> None:
    """Raise RowsError unless the first row has every mapped column; later rows may lack it and are counted as missing.

    There is at least one row; ``source`` names the rows in the message, ``setting`` the setting that gave the column map.
    """
    for name, path in columns.items():
        try:
            value_at(rows[0], path)
        except (KeyError, IndexError, TypeError, ValueError):
            existing = ", ".join(list_paths(rows[0]))
            raise RowsError(
                f"{source}: no column {path!r} (mapped to {name!r}). The columns are: {existing}. Set "
                f"{setting}.{name} to one of them."
            ) from None


def text_at(row: Mapping[str, Any], path: str) -> str:
    """Return the stripped text at a path, "" where there is none; the turns of a conversation are joined by blank lines."""
    value = find_value(row, path)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return replace_surrogates("\n\n".join(str(part).strip() for part in value))
    return "" if value is None else replace_surrogates(str(value).strip())


def replace_surrogates(text: str) -> str:
    r"""Replace lone surrogates (in JSON, a character cut in half), which neither tokenizers nor UTF-8 files accept.

    Examples:
        >>> replace_surrogates("cut \ud83d") == "cut \ufffd", replace_surrogates("\ud83d\ude00") == "\U0001f600"
        (True, True)
    """
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def list_paths(row: Mapping[str, Any]) -> list[str]:
    """Return the names of existing columns, nested ones with dots."""
    paths: list[str] = []
    for name, value in row.items():
        paths += (
            [f"{name}.{inner}" for inner in list_paths(value)]
            if isinstance(value, Mapping) and value
            else [str(name)]
        )
    return paths
