"""Settings of a run as plain values: kept in a checkpoint and compared with the run that goes on from it.

An object is described by its class and its settings. These are its public attributes, so a user's class needs no method for
it; if an argument of its constructor is kept under another name, private attributes count as well. They are read when the
run is made; an attribute that differs each time, such as the time of day, needs a private name. An object of fedlight may
have been in an earlier run: of it the constructor's arguments count, or public attributes where these have other names.
"""

import dataclasses
import inspect
import re
from collections.abc import Mapping
from datetime import date, timedelta
from enum import Enum
from functools import partial
from hashlib import blake2b
from numbers import Number
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

CLASS = "class"
MOST_ITEMS = 1000
MOST_NAMED = 3
Nested = TypeVar("Nested")
Difference = tuple[str, Any, Any]
"""Name of a setting, its value before and its value now."""
OWN_PATH = re.compile(r"^fedlight\.(?:[a-z_0-9]+\.)+(?=\w)")


def described(value: Any, seen: tuple[object, ...] = ()) -> Any:
    """Return plain values that describe ``value``, the same in every process.

    Functions and classes are described by their names, tensors and containers of more than 1000 items by a digest; of the
    objects ``seen``, which contain the value, only the class is named again.

    Examples:
        >>> from fedlight.federation.server import FedAvgM
        >>> described({"server": FedAvgM(beta=0.5), "seed": 3})
        {'server': {'class': 'fedlight.FedAvgM', 'lr': 1.0, 'beta': 0.5}, 'seed': 3}
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (np.ndarray, np.generic, Tensor)):
        return _of_numbers(value)
    if isinstance(value, (Path, Enum)):
        return str(value)
    if isinstance(value, (bytes, Number, torch.dtype, timedelta, date)):
        return repr(value)
    if isinstance(value, type) or inspect.isroutine(value):
        return _path(value)
    if any(value is holder for holder in seen):  # it holds itself, so there is no end
        return {CLASS: _path(type(value))}
    seen = (*seen, value)
    if isinstance(value, Mapping):
        return _short({str(key): described(item, seen) for key, item in value.items()})
    if isinstance(value, (list, tuple, range)):
        return _short([described(item, seen) for item in value])
    if isinstance(value, (set, frozenset)):
        return _short(sorted((described(item, seen) for item in value), key=repr))
    settings = {name: described(item, seen) for name, item in _settings(value).items()}
    return {CLASS: _path(type(value)), **settings}


def with_plain_values(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings for a checkpoint: nested ones as maps, paths as texts and numbers of numpy as Python's.

    Examples:
        >>> with_plain_values({"model": Path("my_model"), "lr": np.float64(0.5)})
        {'model': 'my_model', 'lr': 0.5}
    """
    return {
        name: str(value)
        if isinstance(value, Path)
        else value.item()
        if isinstance(value, np.generic)
        else dataclasses.asdict(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type)
        else value
        for name, value in settings.items()
    }


def made_of(kind: type[Nested], given: Nested | Mapping[str, Any]) -> Nested:
    """Return nested settings, which a checkpoint has as a map.

    Examples:
        >>> made_of(complex, {"real": 1.0, "imag": 2.0})
        (1+2j)
    """
    return kind(**given) if isinstance(given, Mapping) else given


def refuse_other_settings(saved: Mapping[str, Any], new: Mapping[str, Any], remedy: str) -> None:
    """Raise ValueError for settings that differ from a checkpoint's; ``remedy`` is the alternative to giving the same.

    Examples:
        >>> refuse_other_settings({"lr": 0.1}, {"lr": 0.2}, "start anew")
        Traceback (most recent call last):
        ValueError: the checkpoint was trained with lr=0.1 and goes on with it, not with lr=0.2: give the same, or start anew
    """
    changes = differences(saved, new)
    if not changes:
        return
    (name, was, now), *others = changes
    also = "".join(f"; {name}={was}, not {now}" for name, was, now in others[: MOST_NAMED - 1])
    more = f"; and {len(others) + 1 - MOST_NAMED} more" if len(others) >= MOST_NAMED else ""
    raise ValueError(
        f"the checkpoint was trained with {name}={was} and goes on with it, not with {name}={now}{also}{more}: "
        f"give the same, or {remedy}"
    )


def differences(saved: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    """Return the name of each setting in ``saved`` and ``new`` that differs, and both values, those of objects one by one.

    Names that only one side has are not compared, neither here nor in an object: another version may have more.

    Examples:
        >>> was, now = ({"server": {"class": "fedlight.FedAvgM", "beta": beta}} for beta in (0.5, 0.9))
        >>> differences(was, now)
        [('server.beta', 0.5, 0.9)]
    """
    known = [name for name in saved if name in new]
    return [each for name in known for each in _differences(saved[name], new[name], name)]


def constructor_arguments(kind: type) -> list[str]:
    """Return names of the constructor's arguments, with those that it passes on to base classes."""
    names: list[str] = []
    for cls in kind.__mro__[:-1]:
        if "__init__" not in vars(cls):
            continue
        parameters = [*inspect.signature(vars(cls)["__init__"]).parameters.values()][1:]
        others = [p for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        names += [p.name for p in parameters if p not in others]
        if not others:
            break
    return names


def digest(*parts: Any) -> str:
    """Return a digest of plain values and arrays, 16 hexadecimal digits."""
    hasher = blake2b(digest_size=8)
    for part in parts:
        content = (
            np.ascontiguousarray(part).tobytes() if isinstance(part, np.ndarray) else repr(part).encode()
        )
        # By its length "ab", "c" differs from "a", "bc".
        hasher.update(len(content).to_bytes(8, "big") + content)
    return hasher.hexdigest()


def _differences(saved: Any, new: Any, name: str) -> list[Difference]:
    if isinstance(saved, Mapping) and isinstance(new, Mapping):
        if _without_file(saved.get(CLASS)) != _without_file(new.get(CLASS)):
            return [(name, saved.get(CLASS, saved), new.get(CLASS, new))]
        is_object = CLASS in saved
        names = [key for key in {**saved, **new} if not is_object or (key in saved and key in new)]
        inner = [
            _differences(saved.get(key, "nothing"), new.get(key, "nothing"), f"{name}.{key}") for key in names
        ]
        return [each for differences in inner for each in differences]
    if isinstance(saved, list) and isinstance(new, list) and len(saved) == len(new):
        inner = [_differences(a, b, f"{name}[{i}]") for i, (a, b) in enumerate(zip(saved, new, strict=True))]
        return [each for differences in inner for each in differences]
    same = _without_file(saved) == _without_file(new) or (saved != saved and new != new)  # NaN equals NaN
    return [] if same else [(name, _brief(saved), _brief(new))]


def _short(value: Any) -> Any:
    if len(value) <= MOST_ITEMS:
        return value
    ordered = (
        dict(sorted(value.items())) if isinstance(value, dict) else value
    )  # equal maps may differ in order
    return f"{len(value)} items, digest {digest(ordered)}"


def _brief(value: Any) -> Any:
    return value.get(CLASS, value) if isinstance(value, Mapping) else value


def _settings(value: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    attributes = getattr(value, "__dict__", {})
    public = {name: item for name, item in attributes.items() if not name.startswith("_")}
    arguments = constructor_arguments(type(value))
    unknown = [name for name in arguments if name not in public]
    if type(value).__module__.startswith("fedlight."):  # its other attributes may be what a run has left
        return public if unknown else {name: public[name] for name in arguments}
    # Where an argument is kept in a private attribute only, these are compared as well.
    return {name.lstrip("_"): item for name, item in attributes.items()} if unknown else public


def _of_numbers(value: Any) -> Any:
    array = value.detach().cpu() if isinstance(value, Tensor) else np.asarray(value)
    if array.ndim == 0:
        item = array.item()
        return item if type(item) in (bool, int, float, str) else repr(item)
    kind, shape = str(array.dtype).removeprefix("torch."), tuple(array.shape)
    return f"{kind} {shape} {digest(array.tolist())}"


def _path(obj: Any) -> str:
    name = getattr(obj, "__qualname__", type(obj).__name__)
    return _without_file(f"{getattr(obj, '__module__', '')}.{name}")


def _without_file(name: Any) -> Any:
    """Return the dotted name of a class or function of fedlight without its file, which may move; all else as it is."""
    return OWN_PATH.sub("fedlight.", name) if isinstance(name, str) else name
