"""Folder of a Flower app: pyproject.toml, the config, README.md and .gitignore; Flower itself need not be installed.

Templates of the texts are in ``app_files``.
"""

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from string import Template
from typing import Any

import yaml

from fedlight.flower.messages import Bounds
from fedlight.flower.parts import Parts, clients_needed, kept_by_node, kept_by_server, refuse_undeployable
from fedlight.flower.settings import OF_APP
from fedlight.lightning_cli.cli import find_config
from fedlight.lightning_cli.config_files import layers
from fedlight.recipes.overlay import as_yaml
from fedlight.recipes.stages import settings_in
from fedlight.runs.contents import texts_in
from fedlight.support.checks import read_yaml
from fedlight.support.files import write_whole

FILES = Path(__file__).parent / "app_files"
DEFAULTS: dict[str, str | int | bool] = {
    "set": "",
    "min-clients": 0,
    "deadline-seconds": 0,
    "wait-seconds": 600,
    "max-clients": Bounds.clients,
    "max-metrics": Bounds.metrics,
    "max-header-mib": Bounds.header_mib,
    "secure-aggregation": False,
}
YAML = (".yaml", ".yml")
LONGEST_NAME = 32  # most characters of an app's name that Flower takes


def write_app(config: str, folder: Path, settings: Sequence[str] = ()) -> list[str]:
    """Write the new or empty folder of an app that runs a config, and return sentences about paths and callbacks.

    ``settings`` are further arguments of ``fedlight fit``, such as ``["--federated.local_steps", "3"]``.

    Raises:
        ValueError: the folder is not empty, the config does not fit a deployment, or names other configs.
    """
    folder = folder.expanduser().absolute()  # Flower runs a copy of the app from another folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there and not empty: give a new folder, or remove what is in it")
    name = app_name(folder.name)
    # find_config takes an argument of the command, and gives the path of fedlight's own configs.
    source = Path(find_config(f"--config={config}").removeprefix("--config="))
    parts = Parts([f"--config={source}", *settings], kept_by_server)
    refuse_undeployable(parts)  # before a folder is made
    for setting in settings:
        value = setting.rpartition("=")[2]
        if value in ("--config", "-c") or value.endswith(YAML):
            raise ValueError(
                f"{setting} names a further config, and the app's config has to be whole: put all into one file, with "
                "fedlight fit ... --print_config"
            )
    # A config on top of another one becomes a whole one, without its comments.
    is_whole = layers(str(source)) == [source]
    text = read_yaml(source) if is_whole else as_yaml(settings_in(str(source)))
    values = yaml.safe_load(text)
    named = (text for _, text in texts_in(values) if text.endswith(YAML) and " " not in text)
    if file := next(named, None):
        raise ValueError(
            f"{source} refers to {file}, and the app's config has to be whole: write the keys of that file into it, or take "
            f"what fedlight fit --config {source} --print_config prints"
        )
    text = with_root(text, folder / "runs")
    notes = left_out(parts) + [
        f"relative path {path}: each process looks for it below the folder in which its SuperLink or SuperNode was started; "
        "make it absolute, or give each node its own in --node-config"
        for path in sorted(set(_relative_paths(values)))
    ]
    folder.mkdir(parents=True, exist_ok=True)
    written = {
        source.name: text,
        "pyproject.toml": pyproject(name, source.name, settings),
        "README.md": readme(name, source.name, folder, clients_needed(parts.settings()), notes),
        ".gitignore": text_of("gitignore"),
    }
    for file, content in written.items():
        write_whole(folder / file, content)
    return notes


def app_name(folder: str) -> str:
    """Return the name of an app for a folder, as Flower takes it.

    Raises:
        ValueError: it does not begin with a letter, or is too long.

    Examples:
        >>> app_name("my_app")
        'my-app'
    """
    name = re.sub(r"[^A-Za-z0-9]+", "-", folder).strip("-")  # Flower refuses all others
    if not name[:1].isalpha() or len(name) > LONGEST_NAME:
        raise ValueError(
            f"{folder!r} makes no name of a Flower app: begin the folder's name with a letter, at most {LONGEST_NAME} "
            "letters, digits and hyphens"
        )
    return name


def left_out(parts: Parts) -> list[str]:
    """Return sentences about the callbacks that are not used at one of the ends."""
    of_node = [type(callback).__name__ for callback in parts.callbacks if kept_by_node(callback)]
    left = [type(callback).__name__ for callback in parts.left_out]
    only = [name for each in parts.callbacks if (name := type(each).__name__) not in (*of_node, *left)]
    sentences = {
        "left out, since they need the clients' rows or models, which no server has": left,
        "run at the server alone": only,
    }
    return [f"{words}: {', '.join(names)}" for words, names in sentences.items() if names]


def with_root(text: str, folder: Path) -> str:
    r"""Return the text of a config with another ``trainer.default_root_dir``; all else stays.

    Examples:
        >>> print(with_root("trainer:\n  max_epochs: 3  # rounds\n", Path("/srv/run")), end="")
        trainer:
          default_root_dir: "/srv/run"
          max_epochs: 3  # rounds
        >>> with_root("trainer: {default_root_dir: runs/a, max_epochs: 3}", Path("/srv/run"))
        'trainer: {default_root_dir: "/srv/run", max_epochs: 3}'
    """
    value = json.dumps(str(folder), ensure_ascii=False)  # JSON is YAML
    trainer = _value_of(yaml.compose(text), "trainer")
    if not isinstance(trainer, yaml.MappingNode) or not trainer.value:
        if trainer is not None:
            raise ValueError("the config's trainer: is empty: give it max_epochs: 3, or leave it out")
        return f"{text.rstrip()}\n\ntrainer:\n  default_root_dir: {value}\n"
    # The text is edited in place: written anew by yaml it would lose its comments.
    old = _value_of(trainer, "default_root_dir")
    if old is not None:
        return text[: old.start_mark.index] + value + text[old.end_mark.index :]
    first = trainer.value[0][0].start_mark
    # In braces keys are on one line; else the next key is indented like the first.
    ends = ", " if trainer.flow_style else "\n" + " " * first.column
    return f"{text[: first.index]}default_root_dir: {value}{ends}{text[first.index :]}"


def _value_of(node: Any, key: str) -> Any:
    return next((value for name, value in node.value if name.value == key), None)


def _relative_paths(values: Any) -> Iterator[str]:
    """Yield the strings of a config that are relative paths of existing files or folders."""
    for _, text in texts_in({key: value for key, value in values.items() if key != "trainer"}):
        # Longer texts are templates; to look for a file of such a name may be an error.
        path = len(text) < 300 and "\n" not in text and ("/" in text or "." in text)
        if path and not Path(text).is_absolute() and Path(text).exists():
            yield text


def text_of(file: str) -> str:
    """Return the text of a file in ``app_files``."""
    return (FILES / file).read_text(encoding="utf-8")


def pyproject(name: str, config: str, settings: Sequence[str]) -> str:
    """Return the pyproject.toml of an app."""
    values = {"config": config, **DEFAULTS, "set": shlex.join(settings)}  # both ends split it by shlex
    texts = {key: json.dumps(value, ensure_ascii=False) for key, value in values.items()}
    lines = [f"# {OF_APP[key]}\n{key} = {text}" for key, text in texts.items()]
    return Template(text_of("pyproject.template")).substitute(
        name=name, config=config, settings="\n".join(lines)
    )


def readme(name: str, config: str, folder: Path, clients: int, notes: Sequence[str]) -> str:
    """Return the README.md of an app, with the fewest clients for a start, and notes on callbacks and paths."""
    listed = "".join(f"\n* {note[:1].upper()}{note[1:]}." for note in notes) + "\n" * bool(notes)
    return Template(text_of("README.template")).substitute(
        name=name, config=config, folder=folder, clients=clients, notes=listed
    )
