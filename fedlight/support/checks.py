"""Checks of settings, made before any work.

The arguments of a constructor are checked against its annotations when an object is made; on the command line the parser
does so. YAML is checked before it is read.
"""

import collections.abc
import difflib
import inspect
import math
import re
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, is_dataclass
from functools import cache
from importlib import import_module
from numbers import Integral, Real
from pathlib import Path
from textwrap import shorten
from typing import Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints

from fedlight.support.files import BoundError, read_text

MOST_YAML_BYTES = 2**20
MOST_DEPTH = 100
MOST_REPEATED = 10_000
"""Values for which aliases (``*name``) stand, all together."""

KINDS: dict[Any, tuple[str, tuple[type, ...]]] = {
    bool: ("true or false", (bool,)),
    int: ("a whole number", (Integral,)),
    float: ("a number", (Real,)),
    str: ("a text", (str, Path)),
    None: ("None", (types.NoneType,)),
}
"""Type of an annotation -> its name for users, and the types of its values; true and false are no numbers.

A path is a text.
"""
OWN = "fedlight."


class Checked:
    """Base of the classes that take settings.

    Raises:
        ValueError: when an object is made, for an argument that does not fit its annotation.

    Examples:
        >>> from fedlight import FederatedLoop
        >>> FederatedLoop(clients_per_round=2.5)
        Traceback (most recent call last):
        ValueError: FederatedLoop: clients_per_round=2.5 must be a whole number
        >>> FederatedLoop(algorithm="FedProks")
        Traceback (most recent call last):
        ValueError: FederatedLoop: algorithm='FedProks' must be an Algorithm or None: give an object, algorithm=FedProx()
    """

    maps: ClassVar[tuple[str, ...]] = ()
    """Nested settings that the class also takes as maps, as its checkpoints have them."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Check the arguments; copies, which are made without any, are not checked."""
        if cls.__init__ is object.__init__ and (args or kwargs):
            raise TypeError(f"{cls.__name__}() takes no arguments")
        _refuse_unfit(cls, args, kwargs)
        return super().__new__(cls)


@dataclass(frozen=True)
class Settings:
    """Base of dataclasses whose fields are checked against their annotations, as `Checked` does arguments.

    The command line reads a dataclass by its fields alone only if all its bases are dataclasses.
    """

    def __post_init__(self) -> None:
        _refuse_unfit(type(self), (), vars(self))


def _refuse_unfit(cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    maps = getattr(cls, "maps", ())
    for name, value, hint in _given(cls, args, kwargs):
        if not fits(value, hint) and not (name in maps and isinstance(value, Mapping)):
            raise ValueError(_describe(cls, name, value, hint))


def refuse_unfit_arguments(
    function: collections.abc.Callable[..., Any], arguments: Mapping[str, Any]
) -> None:
    """Raise ValueError where an argument of fedlight's function does not fit its annotation; maps stand for dataclasses."""
    if not function.__module__.startswith(OWN):  # annotations of others may be meant loosely
        return
    try:
        hints = get_type_hints(function)
    except NameError:  # an annotation for type checkers alone
        return
    for name, value in arguments.items():
        if name in hints and not is_dataclass(hints[name]) and not fits(value, hints[name]):
            raise ValueError(_describe(function, name, value, hints[name]))


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value is of an annotation's type; True where that cannot be told.

    Examples:
        >>> fits(2, int | None), fits(2.5, int | None), fits(True, int), fits(2, float), fits("ab", list[str])
        (True, False, False, True, False)
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, each) for each in inner)
    if origin is Literal:
        return any(isinstance(value, type(each)) and value == each for each in inner)  # True equals 1
    kind = None if hint is types.NoneType else hint
    if kind in KINDS:
        is_truth = isinstance(value, KINDS[bool][1])
        return isinstance(value, KINDS[kind][1]) and (kind is bool or not is_truth)
    cls = origin or hint
    if cls is Any:
        return True
    if getattr(cls, "_is_protocol", False) and not getattr(cls, "_is_runtime_protocol", False):
        return not isinstance(value, type | str | Real | Collection | None)  # of objects that cannot be told
    if cls is collections.abc.Callable:
        return callable(value)
    if cls is type:
        return isinstance(value, type)
    if not isinstance(cls, type):
        return True
    if issubclass(cls, Mapping):
        # The ids of clients may be numbers where an annotation has texts.
        return isinstance(value, Mapping) and (
            not inner or all(fits(each, inner[1]) for each in value.values())
        )
    if issubclass(cls, tuple) and inner and inner[-1] is not ...:
        return _is_list(value) and len(value) == len(inner) and all(map(fits, value, inner))
    if issubclass(cls, Sequence):
        return _is_list(value) and (not inner or all(fits(each, inner[0]) for each in value))
    return isinstance(value, cls)


def _is_list(value: Any) -> bool:
    return isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping | Set)


def _given(cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, value and annotation of each argument; a constructor that passes others on leaves them to its base's."""
    for parameters, hints in _constructors(cls):
        names = [name for name, each in parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
        for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
            if name in hints:
                yield name, value, hints[name]
        # Positional arguments end here: a constructor passes others on by name alone.
        args, kwargs = (), {name: value for name, value in kwargs.items() if name not in parameters}


@cache
def _constructors(cls: type) -> list[tuple[Mapping[str, inspect.Parameter], dict[str, Any]]]:
    """Return parameters and annotations of a constructor and, where it passes arguments on, of the base classes' ones."""
    constructors: list[tuple[Mapping[str, inspect.Parameter], dict[str, Any]]] = []
    for base in cls.__mro__[:-1]:
        if "__init__" not in vars(base):
            continue
        parameters = dict([*inspect.signature(vars(base)["__init__"]).parameters.items()][1:])
        is_own = base.__module__.startswith(OWN)  # annotations of others may be meant loosely
        constructors.append((parameters, get_type_hints(vars(base)["__init__"]) if is_own else {}))
        if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            break
    return constructors


def _describe(cls: Any, name: str, value: Any, hint: Any) -> str:
    """Return the message for a value that does not fit its annotation, with the remedy where one is near."""
    given = (
        f"{cls.__name__}: {name}={value.__name__ if isinstance(value, type) else shorten(repr(value), 100)}"
    )
    text = f"{given} must be {' or '.join(dict.fromkeys(_names(hint)))}"
    kinds = _flat(hint)
    if classes := [each for each in kinds if isinstance(each, type) and each.__module__.startswith(OWN)]:
        return text + _instead(name, value, classes)
    choices = [choice for each in kinds if get_origin(each) is Literal for choice in get_args(each)]
    near = difflib.get_close_matches(str(value), map(str, choices), n=1)
    if all(get_origin(each) is Literal for each in kinds):
        text = f"{given} is not one of {', '.join(map(str, choices))}"
    return f"{text}; did you mean {near[0]!r}?" if near else text


def _instead(name: str, value: Any, classes: Sequence[type]) -> str:
    """Return the remedy for a class, or a class's name, where an object is wanted."""
    if isinstance(value, type):
        return f": give an object, {name}={value.__name__}()" if {*classes} & {*value.__mro__} else ""
    if not isinstance(value, str):
        return ""
    known = [each.__name__ for cls in classes for each in (cls, *classes_below(cls))]
    public = [each for each in import_module("fedlight").__all__ if each[0].isupper()]
    similar = (difflib.get_close_matches(value, names, n=1) for names in (known, public))
    near = next(filter(None, similar), [classes[0].__name__])
    return f": give an object, {name}={near[0]}()"


def classes_below(cls: type) -> Iterator[type]:
    """Yield the classes that are derived from a class, at any depth."""
    children: list[type] = cls.__subclasses__()
    for child in children:
        yield child
        yield from classes_below(child)


def _flat(hint: Any) -> list[Any]:
    is_union = get_origin(hint) in (Union, types.UnionType)
    return [part for each in get_args(hint) for part in _flat(each)] if is_union else [hint]


def _names(hint: Any) -> Iterator[str]:
    """Yield the names of an annotation's alternatives for a message."""
    for each in sorted(_flat(hint), key=lambda part: part is types.NoneType):
        kind, cls = None if each is types.NoneType else each, get_origin(each) or each
        if get_origin(each) is Literal:
            yield from map(repr, get_args(each))
        elif kind in KINDS:
            yield KINDS[kind][0]
        elif cls is collections.abc.Callable:
            yield "a function"
        else:
            name = re.sub(
                r"(\w+\.)+", "", str(each) if get_args(each) else getattr(cls, "__name__", str(cls))
            )
            yield f"a{'n' if name[0] in 'AEIOU' else ''} {name}"


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
    """Raise ValueError for a number outside of ``[low, high]``, or of ``(low, high]`` with ``above_low``, and for infinity.

    Examples:
        >>> check_range("lora_dropout", 5, 0, 1)
        Traceback (most recent call last):
        ValueError: lora_dropout=5 must be in [0, 1]
    """
    if not (low < value if above_low else low <= value) or value > high or value == math.inf:
        end = ")" if high == math.inf else "]"
        raise ValueError(f"{setting}={value} must be in {'(' if above_low else '['}{low}, {high}{end}")


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
        >>> refuse_below(1, local_steps=3, clients_per_round=None)
        >>> refuse_below(1, "WinRate.", every_n_epochs=0)
        Traceback (most recent call last):
        ValueError: WinRate.every_n_epochs=0 must be at least 1
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
        # libyaml's parser is the faster one, where it is installed.
        _check(yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)), name)
    except yaml.YAMLError:  # said in the words of the parser that commands use
        _check(yaml.parse(text), name)


def _check(events: Iterable[Any], name: str) -> None:
    import yaml

    sizes: dict[str, int] = {}  # of each anchor's node, with its aliases expanded
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
        # A few hundred bytes of nested aliases can stand for gigabytes.
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
