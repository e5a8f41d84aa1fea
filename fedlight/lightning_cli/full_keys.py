"""Errors that name a setting by its whole key: a class knows its own arguments, and not where in a config it stands."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fedlight.lightning_cli.given_once import given_at

OF_PART = re.compile(r"(model|data|federated)\.init_args\.\w+")
"""Keys of arguments that a message may name without their value."""
OF_LOOP = re.compile(
    r"(?<![\w.\]'\"/=?&-])((?:[Ss]et|[Ll]eave|[Ll]ower|[Rr]aise|[Tt]ake out|[Tt]ake) )?([a-z]\w*(?:\.\w+)*)(?![\w'])(=?)"
)
"""A word that may be a setting of the federated loop, with a remedy's verb before it and a value's sign after it."""


@contextmanager
def full_keys(config: dict[str, Any]) -> Iterator[None]:
    """Give the settings that an error of the body names their whole keys in ``config``, in place."""
    try:
        yield
    except (ValueError, OSError) as error:
        if len(error.args) == 1 and isinstance(error.args[0], str):
            error.args = (with_full_key(error.args[0], config),)
        raise


def with_full_key(message: str, config: dict[str, Any]) -> str:
    """Return a message with the whole key of each ``argument=value``, and of an argument after "set", that it names.

    For a setting of ``federated``, the remedy ``set argument=value`` becomes the option. A word stays unchanged where no
    place of ``config`` has it, or more than one.

    Examples:
        >>> encoder = {"init_args": {"model": "b"}}
        >>> config = {"model": {"init_args": {"model": "a"}}, "data": {"init_args": {"encoder": encoder}}}
        >>> with_full_key("model='b': there is no such folder", config)
        "data.init_args.encoder.init_args.model='b': there is no such folder"
        >>> with_full_key("tokenizer='b': there is no such folder", config)
        "tokenizer='b': there is no such folder"
        >>> config = {"data": {"init_args": {"source": "a.csv", "columns": {}, "max_tokens": 3}}}
        >>> with_full_key("a.csv, row 2: max_tokens=3 is too short", config)
        'data.init_args.source=a.csv, row 2: data.init_args.max_tokens=3 is too short'
        >>> with_full_key("toy:votes?max_tokens=3: there is no such file", config)
        'toy:votes?max_tokens=3: there is no such file'
        >>> with_full_key("there is no column x: set columns.input", config)
        'there is no column x: set data.init_args.columns.input'
        >>> config = {"federated": {"init_args": {"limits": {"init_args": {"rounds": 9}}}}}
        >>> with_full_key("rounds=9 is more than 3: set rounds=3", config)
        'federated.limits.rounds=9 is more than 3: set --federated.limits.rounds 3'
        >>> with_full_key("limits.rounds=4 asks for a server: leave server out", {"federated": {"init_args": {
        ...     "limits": {"init_args": {"rounds": 4}}, "server": None}}})
        'federated.limits.rounds=4 asks for a server: leave federated.server out'
    """
    values = list(values_in(config))[1:]

    def of_value(match: re.Match[str]) -> str:
        given = message[match.end() :]
        places = {
            given_at(key, config)
            for key, value in values
            if f"_{key.rpartition('.')[2]}".endswith(f"_{match[1]}")  # a choice_template is a template
            # `3` is not the beginning of 30 or of 3.5.
            and any(re.match(re.escape(text) + r"(?!\w|\.\d)", given) for text in _texts(value))
        }
        place = places.pop() if len(places) == 1 else ""
        # Inside of a sentence only arguments of classes: "trainer with devices=2" says whose it is.
        return f"{place}=" if place and (not match.start() or ".init_args." in place) else match[0]

    def of_name(match: re.Match[str]) -> str:
        places = [key for key, _ in values if OF_PART.fullmatch(key) and key.rpartition(".")[2] == match[2]]
        return f"{match[1]}{places[0]}" if len(places) == 1 else match[0]

    def of_remedy(match: re.Match[str]) -> str:
        places = [key for key, _ in values if re.fullmatch(rf"federated\.(.+\.)?{match[2]}", key)]
        return f"{match[1]}--{places[0]} " if len(places) == 1 else match[0]

    whole = re.sub(r"(?<![\w.\]?&-])([a-z]\w*)=(?=\S)", of_value, message)
    whole = re.sub(r"\b([Ss]et )([a-z]\w*)=(?=\S)", of_remedy, whole)
    whole = OF_LOOP.sub(lambda match: _of_loop(match, config), whole)
    whole = re.sub(r"\b([Ss]et )([a-z]\w*)\b(?![=(]|\.init_args)", of_name, whole)
    # The message may begin with a value: "a.csv, row 2: ..." gets the key in front.
    texts = [(key, value) for key, value in values if isinstance(value, str) and len(value) > 2]
    first = [key for key, text in texts if message.startswith((f"{text}:", f"{text},"))]
    whole = f"{given_at(first[0], config)}={whole}" if len(first) == 1 else whole
    return re.sub(r"\bfederated(\.\w+)+", lambda key: key[0].replace(".init_args", ""), whole)


def _of_loop(match: re.Match[str], config: dict[str, Any]) -> str:
    """Return a setting of the federated loop that a message names, with the loop's key in front."""
    verb, path, after = match.groups()
    node = (config.get("federated") or {}).get("init_args") or {}
    for name in path.split("."):
        node = node.get("init_args", node) if isinstance(node, dict) else {}
        if name not in node:
            return match[0]
        node = node[name]
    begins = not match.start() and match.string[match.end() :].startswith(":")
    # A word such as "server" is mostly no setting: a verb, a value, a name's form or a colon has to say so.
    says = verb or after or "_" in path or "." in path or begins
    return f"{verb or ''}federated.{path}{after}" if says else match[0]


def _texts(value: Any) -> tuple[str, ...]:
    """Return how messages write a value."""
    if isinstance(value, dict) and "class_path" in value:
        return (value["class_path"].rpartition(".")[2],)
    value = list(value) if isinstance(value, tuple) else value
    return repr(value), str(value)


def values_in(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of nested settings with its key, themselves first; of a list's entries it has their number."""
    yield key, node
    if isinstance(node, dict):
        for name, value in node.items():
            yield from values_in(value, f"{key}.{name}" if key else str(name))
    elif isinstance(node, (list, tuple)):
        for place, value in enumerate(node):
            yield from values_in(value, f"{key}[{place}]")
