"""Texts of an app's folder, of the templates in ``app_files``: its pyproject.toml, README.md and .gitignore."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from string import Template

from fedlight.flower.messages import Bounds
from fedlight.flower.settings import OF_APP

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
