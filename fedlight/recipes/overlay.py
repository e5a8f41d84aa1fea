"""Merging of settings.

Of a recipe with another (`merge_recipes`), of a stage with the one it is like (`merge_arguments`), of a value with a config
(`set_in`). Settings of another class replace those of the old class as a whole: an old argument means something else in the
new class, or would pass for a chosen value.
"""

import math
import re
from typing import Any, TypeGuard

import yaml

from fedlight.lightning_cli.class_names import same_class

OF_A_CLASS = ("class_path", "init_args", "dict_kwargs")
OF_MAPS = (
    *("trainer", "init_args", "dict_kwargs", "split", "format", "rows"),
    *("instructions", "responses", "instruction", "response", "input"),
)
"""Keys whose maps hold arguments, which are merged one by one."""
PLAIN_TEXT = re.compile(r"(?!(?:null|true|false|yes|no|on|off|y|n)$)[A-Za-z_/][\w/.-]*", re.IGNORECASE)
"""Texts that every YAML reader reads as text without quotes."""


def merge_recipes(below: Any, above: Any) -> Any:
    """Return the values of ``below`` updated by those of ``above``.

    Maps are merged; settings of another class, and all other values, are replaced.

    Examples:
        >>> merge_recipes({"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"c": 3}, "d": [2]})
        {'a': {'b': 1, 'c': 3}, 'd': [2]}
        >>> merge_recipes({"class_path": "A", "init_args": {"x": 1}}, {"class_path": "B"})
        {'class_path': 'B'}
    """
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    if is_class(above) and is_class(below) and not same_class(below["class_path"], above["class_path"]):
        return above
    joined = {
        key: merge_recipes(
            _not_replaced(below[key], value, joins=True) if key == "with" else below[key], value
        )
        if key in below
        else value
        for key, value in above.items()
    }
    return {**below, **joined}


def set_in(settings: Any, key: str, value: Any) -> dict[str, Any]:
    """Return a config with a value under a key with dots, set like one on the command line.

    The key may leave out ``init_args``. Arguments of the same class are merged; a map that is itself an argument, such as
    ``columns``, is replaced. ``callbacks+`` adds to the list.

    Examples:
        >>> config = {"data": {"class_path": "A", "init_args": {"x": 1, "columns": {"a": "b"}}}}
        >>> set_in(config, "data.x", 2)
        {'data': {'class_path': 'A', 'init_args': {'x': 2, 'columns': {'a': 'b'}}}}
        >>> set_in(config, "data", {"class_path": "A", "init_args": {"columns": {"c": "d"}}})
        {'data': {'class_path': 'A', 'init_args': {'x': 1, 'columns': {'c': 'd'}}}}
        >>> set_in(config, "data.class_path", "B")
        {'data': {'class_path': 'B'}}
        >>> set_in({"model": None}, "model.a.b", [3])
        {'model': {'a': {'b': [3]}}}

    Raises:
        ValueError: the key goes into a list or into a plain value.
    """
    below: Any = {"class_path": settings} if isinstance(settings, str) else settings or {}
    first, _, rest = key.partition(".")
    if not isinstance(below, dict):
        kind = "a list" if isinstance(below, list) else f"{below!r}"
        raise ValueError(f"{first!r} stands inside of nothing, as the config has {kind} there: give it whole")
    if is_class(below) and first not in OF_A_CLASS:
        first, rest = "init_args", key  # a key may leave it out
    if is_class(below) and first == "class_path":
        changed: dict[str, Any] = _instead_of(below, {"class_path": value})
        return changed
    if not rest and first.endswith("+"):
        first, more = first.removesuffix("+"), value if isinstance(value, list) else [value]
        return {**below, first: [*(below.get(first) or []), *more]}
    if not rest and first in OF_MAPS and isinstance(value, dict):
        return {**below, first: _joined(below.get(first), value)}
    inner = below.get(first)
    return {**below, first: set_in(inner, rest, value) if rest else _instead_of(inner, value)}


def laid_over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Return a config with all that another one sets, like the command line with a second ``--config``.

    Examples:
        >>> below = {"trainer": {"max_epochs": 3, "callbacks": [1]}, "data": {"class_path": "A", "init_args": {"x": 1}}}
        >>> laid_over(below, {"trainer": {"callbacks+": [2]}, "data": {"init_args": {"y": 2}}})
        {'trainer': {'max_epochs': 3, 'callbacks': [1, 2]}, 'data': {'class_path': 'A', 'init_args': {'x': 1, 'y': 2}}}
    """
    for key, value in above.items():
        if key == "trainer" and isinstance(value, dict):
            for name, of_trainer in value.items():
                below = set_in(below, f"{key}.{name}", of_trainer)
        else:
            below = set_in(below, key, value)
    return below


def _instead_of(old: Any, new: Any, is_map: bool = False) -> Any:
    if is_map and isinstance(old, dict) and isinstance(new, dict):
        return _joined(old, new)
    if is_class(old) and isinstance(new, str) and not _is_file(new):  # a class by its name alone
        new = {"class_path": new}
    if is_class(old) and isinstance(new, dict) and "class_path" not in new:  # arguments of the same class
        new = {"class_path": old["class_path"], **(new if {*new} <= {*OF_A_CLASS} else {"init_args": new})}
    if not (is_class(old) and is_class(new) and same_class(old["class_path"], new["class_path"])):
        return new
    return {**old, **new, **{key: _joined(old.get(key), new[key]) for key in OF_MAPS if key in new}}


def _joined(old: dict[str, Any] | None, new: dict[str, Any] | None) -> dict[str, Any]:
    return {
        **(old or {}),
        **{
            key: _instead_of((old or {}).get(key), value, key in OF_MAPS)
            for key, value in (new or {}).items()
        },
    }


def merge_arguments(below: dict[str, Any] | None, above: dict[str, Any] | None) -> dict[str, Any]:
    """Return the ``with:`` of a stage, keys with dots -> values, merged over that of the stage it is ``like:``.

    A key inside of a class is dropped where ``above`` sets that class, another one, or null. It is kept where ``above``
    names a file there, so that the recipe's value wins over the file's.

    Examples:
        >>> merge_arguments({"a": "A", "a.x": 1, "b": 2}, {"a": "B"})
        {'b': 2, 'a': 'B'}
        >>> merge_arguments({"a.x": 1, "b": 2}, {"a": None})
        {'b': 2, 'a': None}
        >>> merge_arguments({"data": "one.yaml", "data.x": 1}, {"data": "other.yaml"})
        {'data.x': 1, 'data': 'other.yaml'}
    """
    below, above = below or {}, above or {}
    kept = _not_replaced(below, above)
    joined = {
        key: {**kept[key], **value}
        for key, value in above.items()
        if key.rpartition(".")[2] in OF_MAPS and isinstance(value, dict) and isinstance(kept.get(key), dict)
    }
    return {**{key: value for key, value in kept.items() if key not in above}, **above, **joined}


def _not_replaced(below: Any, above: Any, joins: bool = False) -> Any:
    """Return the keys with dots, and their values, that ``above`` does not set, by another spelling or in a map around them.

    With ``joins``, ``above`` is of another recipe: a class of the same name keeps the older arguments that it does not
    set, and references are not resolved yet.
    """
    if not isinstance(below, dict) or not isinstance(above, dict):
        return below
    around = {}
    for other, value in above.items():
        old = below.get(other)
        if joins and (value == old or (isinstance(value, str) and "${" in value)):
            continue
        if joins and is_class(value) and is_class(old) and same_class(old["class_path"], value["class_path"]):
            value = {key: inner for key, inner in value.items() if key != "class_path"}
        around[other] = value
    return {
        key: value
        for key, value in below.items()
        if key in above or not any(_sets(other, set_value, key) for other, set_value in around.items())
    }


def _sets(other: str, value: Any, key: str) -> bool:
    """Return whether a value at one key sets another key as well."""
    parts, around = plain(key).removesuffix("+").split("."), plain(other).split(".")
    if around[-1] == "class_path":
        return len(parts) >= len(around) and parts[: len(around) - 1] == around[:-1]
    inside = parts[: len(around)] == around
    return inside and _defines(value, parts[len(around) :], len(around) == 1 or around[-1] in OF_MAPS)


def _defines(value: Any, parts: list[str], of_arguments: bool) -> bool:
    """Return whether a value defines the place inside it that these parts of a key name."""
    if not parts or not isinstance(value, dict) or is_class(value):
        return not parts or not (isinstance(value, str) and _is_file(value))
    if not of_arguments and not {*value} <= {*OF_A_CLASS}:
        return True  # a map that is itself an argument
    inside = {**value, **(value.get("init_args") or {})}
    return parts[0] in inside and _defines(inside[parts[0]], parts[1:], parts[0] in OF_MAPS)


def _is_file(text: str) -> bool:
    return text.endswith((".yaml", ".yml"))


def plain(key: str) -> str:
    """Return a key without ``init_args``.

    Examples:
        >>> plain("federated.init_args.algorithm.init_args.mu")
        'federated.algorithm.mu'
    """
    return ".".join(part for part in key.split(".") if part != "init_args") or key  # init_args itself


def setting_order(key: str) -> tuple[int, bool, bool]:
    """Return a key that sorts settings: a class before its arguments, a list before its additions.

    Examples:
        >>> sorted(["data.x", "data", "data.class_path"], key=setting_order)
        ['data', 'data.class_path', 'data.x']
        >>> sorted(["data.init_args.part", "data.part.x"], key=setting_order)
        ['data.init_args.part', 'data.part.x']
    """
    return plain(key).count("."), not key.endswith(".class_path"), key.endswith("+")


def is_class(value: Any) -> TypeGuard[dict[str, Any]]:
    """Return whether a value is a map that names a class."""
    return isinstance(value, dict) and isinstance(value.get("class_path"), str)


class _Writer(yaml.SafeDumper):
    """YAML writer that quotes every text which could be read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write a value of two places twice, without YAML's anchors."""
        return True


def _text(writer: yaml.SafeDumper, text: str) -> yaml.Node:
    return writer.represent_scalar(
        "tag:yaml.org,2002:str", text, style=None if PLAIN_TEXT.fullmatch(text) else '"'
    )


_Writer.add_representer(str, _text)


def as_yaml(settings: dict[str, Any]) -> str:
    r"""Return a config as YAML; every reader reads its texts as texts.

    Examples:
        >>> as_yaml({"a": "POST : {x}\nCHOICE :", "b": ["1e-5", 1, None, "no"]})
        'a: "POST : {x}\\nCHOICE :"\nb:\n- "1e-5"\n- 1\n- null\n- "no"\n'
    """
    return yaml.dump(settings, Dumper=_Writer, sort_keys=False, allow_unicode=True, width=1000)


def yaml_line(value: Any) -> str:
    """Return a value as YAML on one line, written as by `as_yaml`.

    Examples:
        >>> print(yaml_line("data/votes.jsonl"), yaml_line("a: b"), yaml_line(["a", "2"]), yaml_line({"a": "left"}))
        data/votes.jsonl "a: b" [a, "2"] {a: left}
    """
    options: dict[str, Any] = {"default_flow_style": True, "sort_keys": False, "allow_unicode": True}
    # In a list: YAML would end a text alone with a mark.
    return yaml.dump([value], Dumper=_Writer, width=math.inf, **options).strip()[1:-1]
