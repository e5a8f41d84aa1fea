"""YAML of any origin, bounded in size, depth and aliases before it is read: a few hundred bytes can stand for gigabytes."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedlight.support.files import BoundError, read_text

MOST_BYTES = 2**20
MOST_DEPTH = 100
MOST_REPEATED = 10_000
"""Values for which aliases (``*name``) stand, all together."""


def read_yaml(file: Path) -> str:
    """Return the text of a YAML file within the bounds.

    Raises:
        FileNotFoundError: there is no such file.
        BoundError: it is a pipe, a device or a socket, or passes a bound.
        UnicodeDecodeError: it is no UTF-8.
        yaml.YAMLError: it is no YAML.
    """
    text = read_text(file, MOST_BYTES)
    check_yaml(text, str(file))
    return text


def check_yaml(text: str, name: str) -> None:
    r"""Raise BoundError for YAML that passes a bound, and yaml.YAMLError for what is none; nothing is made of it.

    Examples:
        >>> check_yaml("a: &a [1, 2]\nb: [*a, *a]", "x.yaml")
        >>> check_yaml("[" * 101 + "]" * 101, "x.yaml")
        Traceback (most recent call last):
        fedlight.support.files.BoundError: x.yaml: lists and maps are nested more than 100 deep: write it flatter
    """
    import yaml

    try:
        _check(yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)), name)
    except yaml.YAMLError:  # in the words of the slower parser, with which commands read their configs
        _check(yaml.parse(text), name)


def _check(events: Iterable[Any], name: str) -> None:
    import yaml

    sizes: dict[str, int] = {}  # of what an anchor names, with all that aliases in it stand for
    open_: list[tuple[str | None, int]] = [(None, 0)]
    repeated = 0
    for event in events:
        anchor, size = getattr(event, "anchor", None), 1
        if isinstance(event, yaml.CollectionStartEvent):
            if len(open_) > MOST_DEPTH:
                raise BoundError(
                    f"{name}: lists and maps are nested more than {MOST_DEPTH} deep: write it flatter"
                )
            open_.append((anchor, 1))
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, size = open_.pop()
        elif isinstance(event, yaml.AliasEvent):
            size, anchor = sizes.get(anchor, 1), None
            repeated += size
            if repeated > MOST_REPEATED:
                raise BoundError(
                    f"{name}: aliases (*name) stand for more than {MOST_REPEATED:,} values: write out what is meant"
                )
        elif not isinstance(event, yaml.ScalarEvent):
            continue
        if anchor is not None:
            sizes[anchor] = size
        open_[-1] = (open_[-1][0], open_[-1][1] + size)
