"""JSON files of a run: written whole, some with a digest of their content; a damaged one is refused with its name."""

import json
from pathlib import Path
from typing import Any

from fedlight.support.seals import unsealed
from fedlight.support.whole_files import write_whole

DONE = "done.json"
"""What a finished stage of a recipe has in its folder: ``result``, ``seconds`` and ``files``."""


def write_json(file: Path, content: Any) -> None:
    """Writes all or nothing, so that a stop leaves no half file."""
    write_whole(file, json.dumps(content, indent=2) + "\n")


def read_json(file: Path, remedy: str) -> dict[str, Any]:
    """The object in a file, without its digest.

    Args:
        file: where it is; one without a digest is taken as it is.
        remedy: what to do where the file is damaged.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is empty, cut, no JSON object, or another one than was sealed.
    """
    data = file.read_bytes()
    try:
        content = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        why = "it is no JSON: " + " ".join(str(error).split()) if data.strip(b"\0 \n") else "it is empty"
        raise ValueError(f"{file} is damaged ({why}): {remedy}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} is damaged (it holds no object): {remedy}")
    try:
        return unsealed(content)
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}): {remedy}") from None


def result_of(folder: str | Path) -> dict[str, Any]:
    """Return what a finished stage has returned: the dict of its call, or ``{"metrics": ...}`` of its command.

    Raises:
        ValueError: the stage is not done, or its ``done.json`` is damaged.
    """
    file = Path(folder) / DONE
    if not file.is_file():
        raise ValueError(f"{file}: there is no such file: give the folder of a finished stage")
    result: dict[str, Any] = read_json(file, remedy_for(file.parent)).get("result", {})
    return result


def remedy_for(stage: Path) -> str:
    """Return how to have a damaged stage done again."""
    return f"delete the folder {stage} and those of the stages after it, and the same command does them again"
