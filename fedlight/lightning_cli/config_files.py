"""Checks of config files before they are parsed; a message has the file's name, the line and the remedy."""

from pathlib import Path
from typing import Any

from fedlight.conf import path as conf_path
from fedlight.lightning_cli.parser_words import near

EXAMPLE = "selector.yaml"
OF_RECIPES = ("stages", "extends")
"""Keys of recipes, which no config of a command has."""


def check_config(config: str) -> None:
    """Raise ValueError if a config is missing, a folder, empty, no YAML, no map of keys, a recipe, or has a key twice."""
    import yaml

    path = Path(config)
    if path.is_dir():
        raise ValueError(f"config {config!r} is a folder: give a YAML file")
    if not path.exists():
        own = sorted(file.name for file in conf_path(EXAMPLE).parent.glob("*.yaml"))
        hint = near(path.stem, [Path(name).stem for name in own]).replace("'?", ".yaml'?")
        raise ValueError(
            f"config {config!r}: there is no such file{hint}; fedlight's own configs are {', '.join(own)}"
        )
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise ValueError(f"config {config!r} is no text in UTF-8: give a YAML file") from None
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"config {config!r}{line} is no YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"config {config!r} is no YAML: {error}") from None
    if root is None:
        raise ValueError(f"config {config!r} is empty: {EXAMPLE} is an example of what a config holds")
    if not isinstance(root, yaml.MappingNode):
        raise ValueError(
            f"config {config!r} holds no keys: write one to a line as in trainer: {{max_epochs: 3}}; {EXAMPLE} is an example"
        )
    if any(key.value in OF_RECIPES for key, _ in root.value):
        raise ValueError(
            f"config {config!r} is a recipe: fedlight run {config} --output FOLDER does its stages"
        )
    if twice := _given_twice(root):
        raise ValueError(f"config {config!r}{twice}: YAML would take the last one alone; delete one of them")


def _given_twice(node: Any, within: str = "") -> str:
    """Return the place of a key's second occurrence in the same map, as text; empty if there is none."""
    if not isinstance(node.value, list):
        return ""
    seen: set[str] = set()
    for inner in node.value:
        key, value = inner if isinstance(inner, tuple) else (None, inner)
        name = f"{within}{key.value}" if key else within
        if key and name in seen:
            return f", line {key.start_mark.line + 1} gives {name} a second time"
        seen.add(name)
        if found := _given_twice(value, f"{name}." if key else within):
            return found
    return ""


def configs_of(arguments: list[str]) -> list[str]:
    """Return the config files that a command line names.

    Examples:
        >>> configs_of(["fit", "--config", "a.yaml", "-c=b.yaml", "--data=c.yaml"])
        ['a.yaml', 'b.yaml']
    """
    pairs = [argument.partition("=") for argument in arguments]
    options = ("--config", "-c")
    apart = [arguments[i + 1] for i, word in enumerate(arguments[:-1]) if word in options]
    return apart + [value for option, equals, value in pairs if equals and option in options]
