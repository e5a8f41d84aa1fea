"""What model and data have to agree on is given at one of them: the tokenizer is the model's, the choices are alike."""

from inspect import signature
from typing import Any

from jsonargparse import Namespace

from fedlight.lightning_cli.class_names import find_object

SHARED = (("model", "tokenizer"), ("choices", "format.choices"))
"""Argument of the model, and that of the data with the same value."""


def share_settings(config: Namespace) -> None:
    """Give model and data the same tokenizer and choices where one of them was left at its default, in place.

    Raises:
        ValueError: both were given other choices.
    """
    model, data = (config.get(f"{name}.init_args") for name in ("model", "data"))
    if not isinstance(model, Namespace) or not isinstance(data, Namespace):
        return
    for ours, theirs in SHARED:
        if ours not in model or theirs not in data:
            continue
        value, other = model[ours], data[theirs]
        if value is None or _alike(value, other):
            continue
        if _is_default(config.data, theirs):
            data[theirs] = value
        elif ours == "choices" and _is_default(config.model, ours):
            model[ours] = other
        elif ours == "choices":
            raise ValueError(
                f"model.init_args.{ours}={_plain(value)} and data.init_args.{theirs}={_plain(other)} have to be the same: "
                "give them at one of both"
            )


def given_at(key: str, config: dict[str, Any]) -> str:
    """Return the key that gave the data a value: the model's where both have the same.

    Examples:
        >>> config = {"model": {"init_args": {"model": "x"}}, "data": {"init_args": {"tokenizer": "x"}}}
        >>> given_at("data.init_args.tokenizer", config), given_at("data.init_args.source", config)
        ('model.init_args.model', 'data.init_args.source')
    """
    model, data = ((config.get(name) or {}).get("init_args") or {} for name in ("model", "data"))
    for ours, theirs in SHARED:
        if key == f"data.init_args.{theirs}" and _alike(model.get(ours), _at(data, theirs)):
            return f"model.init_args.{ours}"
    return key


def _is_default(part: Namespace, name: str) -> bool:
    first, _, rest = name.partition(".")
    given = signature(find_object(part.class_path)).parameters.get(first)
    if given is None:
        return False
    return _alike(part.init_args[name], getattr(given.default, rest) if rest else given.default)


def _at(arguments: dict[str, Any], key: str) -> Any:
    first, _, rest = key.partition(".")
    value = arguments.get(first)
    return _at(value, rest) if rest and isinstance(value, dict) else value


def _alike(ours: Any, theirs: Any) -> bool:
    return bool(_plain(ours) == _plain(theirs))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
