"""Column maps from fedlight's names to the columns of any data set.

A column map gives the path of each name in a row; dots lead into nested columns and lists:
``{"post": "info.post", "response_a": "summaries.0.text", "choice": "choice", "client": "worker"}``.
Of a conversation, ``messages.:-1`` are all turns but the last, and ``messages.-1`` is the last. The name ``messages`` keeps
the turns apart for a chat template; other names join them by blank lines.

Names with a meaning: ``response_a``, ``response_b`` and ``choice``, or ``chosen`` and ``rejected``; ``score_a`` and
``score_b``, against which the choice is checked; ``client``; ``category``; ``group``, a known group of the client, which
evaluation compares with what an algorithm finds and which no model sees. Every other name is a slot of the template.
"""

from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

from fedlight.datamodules.rows.rows import RowsError
from fedlight.datamodules.text.chat import read_turns, write_turns
from fedlight.datamodules.text.templates import MESSAGES
from fedlight.support.types import Rows

Columns = Mapping[str, str]
ROLES = {
    "human": "user",
    "prompter": "user",
    "developer": "system",
    "function": "tool",
    "observation": "tool",
}
"""Other names of roles -> those of chat templates."""
ASKERS = {"user", "system", "tool", *ROLES}
"""Speakers of a conversation whose turns are no replies that a model could learn."""
REPLIES = ("response_a", "response_b", "chosen", "rejected")
"""Names of answers in a comparison."""


def value_at(row: Any, path: str) -> Any:
    """Return the value at a dotted path; numbers index lists, negative ones from the end, ``1:`` and ``:-1`` take parts.

    Raises:
        KeyError, IndexError, TypeError, ValueError: the path does not exist.

    Examples:
        >>> value_at({"summaries": [{"text": "s0"}, {"text": "s1"}]}, "summaries.1.text")
        's1'
        >>> value_at({"turns": ["hello", "hi", "bye"]}, "turns.:-1")
        ['hello', 'hi']
    """
    if isinstance(row, Mapping) and path in row:
        return _plain(row[path])  # a column whose own name has dots
    for key in path.split("."):
        row = _plain(row[_place(key)] if _is_list(row) else row[key])
    return row


def _plain(value: Any) -> Any:
    """Return lists and Python's numbers in the place of those of numpy and torch, as pandas reads them from Parquet."""
    return value.tolist() if hasattr(value, "tolist") else value


def _place(key: str) -> int | slice:
    first, colon, last = key.partition(":")
    return slice(int(first) if first else None, int(last) if last else None) if colon else int(key)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def find_value(row: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path; None where the path does not exist."""
    try:
        return value_at(row, path)
    except (KeyError, IndexError, TypeError, ValueError):
        return None


def complete_columns(
    columns: Columns, rows: Rows, defaults: Mapping[str, Sequence[str]], optional: Container[str] = ()
) -> dict[str, str]:
    """Return the column map with a column for each name of ``defaults`` that it lacks: the first that the rows have.

    An optional name without such a column is left out; another one gets its first default, which `check_columns` refuses.

    Examples:
        >>> defaults = {"response": ["response", "output"], "client": ["client"]}
        >>> complete_columns({"instruction": "ask"}, [{"ask": "Hi?", "output": "Yes."}], defaults, optional=["client"])
        {'instruction': 'ask', 'response': 'output'}
    """
    missing = {name: paths for name, paths in defaults.items() if name not in columns}
    existing = {*rows[0]}
    # Only now: reading all rows of a large data set takes long.
    if any(existing.isdisjoint(paths) for paths in missing.values()):
        existing = {path for row in rows for path in row}
    present = {name: [path for path in paths if path in existing] for name, paths in missing.items()}
    added = {
        name: [*present[name], *paths][0]
        for name, paths in missing.items()
        if present[name] or name not in optional
    }
    return {**columns, **added}


def check_names(columns: Columns, names: Sequence[str]) -> None:
    """Raise ValueError for a name of a column map that is nearly one of these, which the map lacks.

    Examples:
        >>> check_names({"clients": "worker"}, ["prompt", "client"])
        Traceback (most recent call last):
        ValueError: columns.clients would be read for nothing; did you mean 'client'?
    """
    lacking = [name for name in names if name not in columns]
    for name in columns:
        if name not in names and (near := get_close_matches(name, lacking, 1, cutoff=0.8)):
            raise ValueError(f"columns.{name} would be read for nothing; did you mean {near[0]!r}?")


def check_columns(
    rows: Rows, columns: Columns, source: str, setting: str = "columns", texts: bool = True
) -> None:
    """Raise RowsError unless a row has every mapped column; the others may lack it and are counted as missing.

    There is at least one row; ``source`` names the rows in the message, ``setting`` the setting that gave the column map.
    With ``texts`` a column must not hold an object that is no text and no turn of a conversation.
    """
    for name, path in columns.items():
        try:
            value = _first_value(rows, path)
        except KeyError:
            existing = ", ".join(list_paths(rows[0]))
            raise RowsError(
                f"{source}: no column {path!r} (mapped to {name!r}). The columns are: {existing}. Set "
                f"{setting}.{name} to one of them."
            ) from None
        strange = next(
            (part for part in _parts(value) if isinstance(part, Mapping) and not is_turn(part)), None
        )
        if texts and strange:
            raise RowsError(
                f"{source}: column {path!r} (mapped to {name!r}) holds objects with {', '.join(map(str, strange))}, which "
                f"are no text. Set {setting}.{name} to the path of a text in it, such as "
                f"{path}.{'0.' if _is_list(value) else ''}{next(iter(strange))}."
            )
        if name == "client" and isinstance(rows, list):  # of other forms, such as Parquet, UTF-8 alone can be
            _refuse_unlike_ids(rows, path, source)


def _first_value(rows: Rows, path: str) -> Any:
    """Return the value at a path in the first row where it exists; raise KeyError if there is none."""
    for row in rows:
        with suppress(KeyError, IndexError, TypeError, ValueError):
            return value_at(row, path)
    raise KeyError(path)


def _refuse_unlike_ids(rows: list[dict[str, Any]], path: str, source: str) -> None:
    """Raise RowsError for ids of two kinds of numbers; for a lone surrogate, which replaced could be another client's."""
    names: dict[float, str] = {}
    for number, row in enumerate(rows, 1):
        client = str(value := find_value(row, path))
        if isinstance(value, int | float) and names.setdefault(value, client) != client:
            raise RowsError(
                f"{source}, row {number}: the client {client} would be another than {names[value]}, of rows before. Write "
                "the ids alike."
            )
        if not client.isascii() and replace_surrogates(client) != client:
            raise RowsError(
                f"{source}, row {number}: the client {client!r} has half of a character, which no file can hold. Rename it, "
                "or write the whole character."
            )


def text_at(row: Mapping[str, Any], path: str) -> str:
    r"""Return the stripped text at a path, "" where there is none; the turns of a conversation are joined by blank lines.

    Examples:
        >>> turns = [{"role": "user", "content": "Hello "}, {"role": "assistant", "content": "Hi"}]
        >>> text_at({"messages": turns}, "messages"), text_at({"messages": turns}, "messages.-1")
        ('Hello\n\nHi', 'Hi')
    """
    return text_of(find_value(row, path))


def text_of(value: Any) -> str:
    """Return the stripped text of a value, as `text_at` does."""
    if isinstance(value, str):
        return replace_surrogates(value.strip())
    return replace_surrogates("\n\n".join(text for text in map(_text_of, _parts(value)) if text))


def field_at(row: Mapping[str, Any], path: str, name: str) -> str:
    """Return the text of a name: of ``messages`` its turns, of an answer the model's turn, else the text at the path."""
    if name == MESSAGES:
        turns = turns_of(find_value(row, path))
        return write_turns(turns) if turns and all(turn["content"] for turn in turns) else ""
    value = find_value(row, path)
    return reply_of(value) if name in (*REPLIES, "response") else text_of(value)


def turns_of(value: Any) -> list[dict[str, str]]:
    """Return the turns of a conversation with ``role`` (``system``, ``user``, ``assistant`` or ``tool``) and ``content``.

    A text is one turn of the user, or what `fedlight.datamodules.text.chat.write_turns` has written.

    Examples:
        >>> turns_of([{"from": "human", "value": "Hello "}, {"from": "gpt", "value": "Hi"}])
        [{'role': 'user', 'content': 'Hello'}, {'role': 'assistant', 'content': 'Hi'}]
        >>> turns_of("Hello")
        [{'role': 'user', 'content': 'Hello'}]
    """
    value = read_turns(value) if isinstance(value, str) else value
    turns = [turn if is_turn(turn) else {"role": "user", "content": turn} for turn in _parts(value)]
    return [
        {
            "role": ROLES.get(speaker := speaker_of(turn), speaker if speaker in ASKERS else "assistant"),
            "content": text_of(turn),
        }
        for turn in turns
    ]


def reply_of(value: Any) -> str:
    """Return the stripped text of an answer; "" for a turn that is not the model's, such as the user's at a chat's end.

    Examples:
        >>> [reply_of({"role": role, "content": "Thanks."}) for role in ("assistant", "user")], reply_of("Thanks.")
        (['Thanks.', ''], 'Thanks.')
    """
    return "" if is_turn(value) and speaker_of(value) in ASKERS else text_of(value)


def speaker_of(turn: Mapping[str, Any]) -> str:
    """Return who speaks in a turn of a conversation, in lower case."""
    return str(turn.get("role", turn.get("from"))).lower()


def is_turn(value: Any) -> bool:
    """Return whether a value is a turn of a conversation, with ``role`` and ``content``, or with ``from`` and ``value``."""
    return isinstance(value, Mapping) and ({"role", "content"} <= {*value} or {"from", "value"} <= {*value})


def _parts(value: Any) -> Sequence[Any]:
    value = _plain(value)
    return value if _is_list(value) else [value]


def _text_of(part: Any) -> str:
    """Return the text of a value or of a turn, whose content may be a list of pieces; "" for another object."""
    if is_turn(part):
        content = part["content"] if "content" in part else part["value"]
        pieces = [piece.get("text", "") if isinstance(piece, Mapping) else piece for piece in _parts(content)]
        return "\n\n".join(str(piece).strip() for piece in pieces if piece)
    if part is None or isinstance(part, Mapping) or (isinstance(part, float) and part != part):
        return ""  # NaN is what pandas puts where there is no value
    if isinstance(part, bytes):  # old writers of Parquet do not mark texts as such
        try:
            return part.decode().strip()
        except UnicodeDecodeError:
            raise RowsError(
                "a column holds bytes that are no text, such as a picture. Map another."
            ) from None
    return str(part).strip()


def replace_surrogates(text: str) -> str:
    r"""Replace lone surrogates (in JSON, a character cut in half), which neither tokenizers nor UTF-8 files accept.

    Examples:
        >>> replace_surrogates("cut \ud83d") == "cut \ufffd", replace_surrogates("\ud83d\ude00") == "\U0001f600"
        (True, True)
    """
    if text.isascii():
        return text
    # UTF-16 joins the two halves of a whole character, which UTF-8 would replace one by one.
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
