"""JSON files of a run's folder: written whole, some with a digest of their content, and damage in them is named."""

import hashlib
import json
from pathlib import Path
from typing import Any

from fedlight.federation.whole_files import write_whole

DIGEST = "digest"


def write_json(file: Path, content: Any) -> None:
    """Writes all or nothing, so that a stop leaves no half file."""
    write_whole(file, json.dumps(content, indent=2) + "\n")


def sealed(content: dict[str, Any]) -> dict[str, Any]:
    """The content with a digest of itself, by which :func:`read_json` notices a change.

    Example:
        >>> sealed({"a": 1})
        {'a': 1, 'digest': '4a6c3a7dfa2e1a6b'}
    """
    plain: dict[str, Any] = json.loads(json.dumps(content))  # as it comes back from a file
    return {**plain, DIGEST: _digest(plain)}


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
    digest = content.pop(DIGEST, None)
    if digest is not None and digest != _digest(content):
        raise ValueError(f"{file} is damaged (it is not what was written): {remedy}")
    return content


def _digest(content: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=8).hexdigest()
