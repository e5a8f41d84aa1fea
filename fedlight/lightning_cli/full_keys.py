"""Errors that name a setting by its whole key: a class knows its own arguments, and not where in a config it stands."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fedlight.lightning_cli.given_once import given_at


@contextmanager
def full_keys(config: dict[str, Any]) -> Iterator[None]:
    """Give an error of the body whose message begins with ``argument=value`` the whole key in ``config``, in place."""
    try:
        yield
    except (ValueError, OSError) as error:
        if len(error.args) == 1 and isinstance(error.args[0], str):
            error.args = (with_full_key(error.args[0], config),)
        raise


def with_full_key(message: str, config: dict[str, Any]) -> str:
    """Return a message with the key of the only place at which ``config`` gives the argument this value.

    The message stays as it is where no place does, or more than one.

    Examples:
        >>> encoder = {"init_args": {"model": "b"}}
        >>> config = {"model": {"init_args": {"model": "a"}}, "data": {"init_args": {"encoder": encoder}}}
        >>> with_full_key("model='b': there is no such folder", config)
        "data.init_args.encoder.init_args.model='b': there is no such folder"
        >>> with_full_key("tokenizer='b': there is no such folder", config)
        "tokenizer='b': there is no such folder"
    """
    found = re.match(r"(\w+)=", message)
    if not found:
        return message
    given = message[found.end() :]
    places = [
        key
        for key, value in _values(config)
        if key.rpartition(".")[2] == found[1]
        and any(re.match(re.escape(text) + r"(?!\w|\.\d)", given) for text in (repr(value), str(value)))
    ]
    return f"{given_at(places[0], config)}={given}" if len(places) == 1 else message


def _values(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of nested maps and lists with its key; of a list's entries the key has their number in brackets."""
    if key:
        yield key, node
    if isinstance(node, dict):
        for name, value in node.items():
            yield from _values(value, f"{key}.{name}" if key else str(name))
    elif isinstance(node, list):
        for place, value in enumerate(node):
            yield from _values(value, f"{key}[{place}]")
