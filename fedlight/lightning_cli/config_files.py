"""Config files before they are parsed: checks, whose messages have the file's name, the line and the remedy, and layers.

A config may begin with ``extends: FILE``, a config that it is laid over, or a list of them: then one file has the method
and another data and model. The name is that of a file beside the config, else of one of fedlight's.
"""

from pathlib import Path
from typing import Any, cast

from fedlight.conf import configs
from fedlight.conf import path as conf_path
from fedlight.support.checks import read_yaml
from fedlight.support.files import BoundError
from fedlight.support.words import near

EXAMPLE = "selector.yaml"
EXTENDS = "extends"
MOST_LAYERS = 30
OF_RECIPES = "stages"  # key of recipes, which no config of a command has
OPTIONS = ("--config", "-c")


def check_config(config: str) -> dict[str, Any]:
    """Return the values of a config by their keys.

    Raises:
        ValueError: it is missing, a folder, empty, no YAML, no map of keys, a recipe, or has a key twice.
    """
    import yaml

    path = Path(config)
    if path.is_dir():
        raise ValueError(f"config {config!r} is a folder: give a YAML file")
    if not path.exists():
        stems = [Path(name).stem for name in configs() if "/" not in name]
        hint = near(path.stem, stems).replace("'?", ".yaml'?")
        known = f"fedlight's own configs are {', '.join(configs())}"
        raise ValueError(f"config {config!r}: there is no such file{hint}; {known}")
    try:
        # Nodes have lines and show a key that is given twice; a dict would hide it.
        root = yaml.compose(read_yaml(path), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        values = yaml.SafeLoader("").construct_document(root) if root else None
        twice = _given_twice(root) if root else ""
    except UnicodeDecodeError:  # a ValueError, so before the last clause
        raise ValueError(f"config {config!r} is no text in UTF-8: give a YAML file") from None
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"config {config!r}{line} is no YAML: {error.problem or error.context}") from None
    except BoundError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # ValueError: month 13. RecursionError: a list that holds itself.
        raise ValueError(f"config {config!r} is no YAML: {error}") from None
    if root is None:
        raise ValueError(f"config {config!r} is empty: {EXAMPLE} is an example of what a config holds")
    if not isinstance(root, yaml.MappingNode):
        raise ValueError(
            f"config {config!r} holds no keys: write one to a line as in trainer: {{max_epochs: 3}}; {EXAMPLE} is an example"
        )
    if any(key.value == OF_RECIPES for key, _ in root.value):
        raise ValueError(f"config {config!r} is a recipe: run it with fedlight run {config} --output FOLDER")
    if twice:
        raise ValueError(f"config {config!r}{twice}: YAML would take the last one alone; delete one of them")
    return cast(dict[str, Any], values)


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
        if place := _given_twice(value, f"{name}." if key else within):
            return place
    return ""


def layers(config: str) -> list[Path]:
    """Return the files of a config, each once and checked: those that it extends in their order, and itself last.

    Raises:
        ValueError: see `check_config`; or a config extends itself, too many others, or something that is no name of a file.
    """
    files: dict[Path, Path] = {}
    _add_layers(config, (), files)
    return [*files.values()]


def _add_layers(config: str, above: tuple[Path, ...], files: dict[Path, Path]) -> None:
    """Add the files of a config to ``files``, by their resolved paths; ``above`` are those that extend it."""
    below = check_config(config).get(EXTENDS)
    file = Path(config)
    names = [below] if isinstance(below, str) else below or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"config {config!r}: {EXTENDS}={below!r} has to be the name of a config or a list")
    above = (*above, file.resolve())
    for name in names:
        beside = file.parent / name
        # Of a name that neither folder has, the message names the path beside the config.
        other = beside if beside.is_file() or not conf_path(name).is_file() else conf_path(name)
        if other.resolve() in above:
            raise ValueError(f"config {config!r} extends {name!r}, which extends it in turn")
        if len(above) + len(files) >= MOST_LAYERS:
            raise ValueError(f"config {config!r}: over {MOST_LAYERS} configs extend each other; join some")
        if other.resolve() not in files:
            _add_layers(str(other), above, files)
    # After the files that it extends: a later one overrides an earlier one.
    files[file.resolve()] = file


def with_layers(arguments: list[str]) -> list[str]:
    """Return a command line with the files that a config extends before it, each once; raise as `layers`."""
    words, rest = [], iter(arguments)
    seen: set[Path] = set()
    for argument in rest:
        option, equals, value = argument.partition("=")
        config = value if equals else next(rest, None) if option in OPTIONS else None
        if option not in OPTIONS or config is None:
            words.append(argument)
            continue
        *below, last = layers(config)
        # The same file a second time would undo all settings in between.
        new = [file for file in below if file.resolve() not in seen]
        words += [f"{option}={file}" for file in [*new, last]]
        seen |= {file.resolve() for file in (*below, last)}
        if below:  # the settings are whole then: saved and printed ones must not be extended again
            words.append(f"--{EXTENDS}=null")
    return words
