"""Checks of settings, made before any work.

YAML is checked before it is read, since a few hundred bytes of it can stand for gigabytes.
"""

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedlight.support.files import BoundError, read_text

MOST_YAML_BYTES = 2**20
MOST_DEPTH = 100
MOST_REPEATED = 10_000
"""Values for which aliases (``*name``) stand, all together."""


def check_choice(setting: str, value: str, options: Iterable[str]) -> None:
    """Raise ValueError for a value that is not among the options, with similar options.

    Examples:
        >>> check_choice("optimizer", "AdmaW", ["SGD", "Adam", "AdamW"])
        Traceback (most recent call last):
        ValueError: optimizer='AdmaW': did you mean 'AdamW' or 'Adam'?
    """
    options = list(options)
    if value in options:
        return
    near = difflib.get_close_matches(value, options, n=2) or options[:8]
    raise ValueError(f"{setting}={value!r}: did you mean {' or '.join(map(repr, near))}?")


def check_range(setting: str, value: float, low: float, high: float, above_low: bool = False) -> None:
    """Raise ValueError for a number outside of ``[low, high]``, or of ``(low, high]`` with ``above_low``.

    Examples:
        >>> check_range("lora_dropout", 5, 0, 1)
        Traceback (most recent call last):
        ValueError: lora_dropout=5 must be in [0, 1]
    """
    if not (low < value if above_low else low <= value) or value > high:
        raise ValueError(f"{setting}={value} must be in {'(' if above_low else '['}{low}, {high}]")


def check_precision(precision: str) -> None:
    """Raise ValueError for a ``trainer.precision`` that would round fp32 adapters.

    Examples:
        >>> check_precision("bf16-mixed")
        >>> check_precision("bf16-true")
        Traceback (most recent call last):
        ValueError: trainer.precision='bf16-true' would round the adapter after every step: set model.dtype, which is...
    """
    if precision.endswith("-true") and not precision.startswith(("32", "64")):
        raise ValueError(
            f"trainer.precision={precision!r} would round the adapter after every step: set model.dtype, which is "
            "the base's, to 'bf16' or 'fp16', and trainer.precision to '32-true' or to a '-mixed' one"
        )


def refuse_below(least: int, owner: str = "", **settings: int | None) -> None:
    """Raise ValueError for a setting below ``least``; None is not checked, and ``owner`` is a prefix of the names.

    Examples:
        >>> refuse_below(1, "federated.", local_steps=3, clients_per_round=None)
        >>> refuse_below(1, "federated.", local_steps=0)
        Traceback (most recent call last):
        ValueError: federated.local_steps=0 must be at least 1
    """
    for name, value in settings.items():
        if value is not None and value < least:
            raise ValueError(f"{owner}{name}={value} must be at least {least}")


def read_yaml(file: Path) -> str:
    """Return the text of a YAML file within the bounds.

    Raises:
        FileNotFoundError: there is no such file.
        BoundError: it is a pipe, a device or a socket, or passes a bound.
        UnicodeDecodeError: it is no UTF-8.
        yaml.YAMLError: it is no YAML.
    """
    text = read_text(file, MOST_YAML_BYTES)
    check_yaml(text, str(file))
    return text


def check_yaml(text: str, name: str) -> None:
    r"""Raise BoundError for YAML that passes a bound, and yaml.YAMLError for other texts.

    Examples:
        >>> check_yaml("a: &a [1, 2]\nb: [*a, *a]", "x.yaml")
        >>> check_yaml("[" * 101 + "]" * 101, "x.yaml")
        Traceback (most recent call last):
        fedlight.support.files.BoundError: x.yaml: lists and maps are nested more than 100 deep: write it flatter
    """
    import yaml

    try:
        _check(yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)), name)
    except yaml.YAMLError:  # said in the words of the parser that commands use
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
            size, anchor = sizes.get(str(anchor), 1), None
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
