"""The folder of a saved vector index, and how damage in it is noticed.

``vectors.npy``, ``graph.hnsw`` of the approximate kind, and ``index.json`` with digests of both and of itself. It is removed
first and written last: a folder without it holds no index.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedlight.support.files import sealed, unsealed, whole_file

FORMAT = 1
HASHED_ROWS = 16_384
ABOUT, VECTORS, GRAPH = "index.json", "vectors.npy", "graph.hnsw"


def write_index(
    folder: Path, vectors: np.ndarray, about: dict[str, Any], save_graph: Callable[[str], int] | None
) -> None:
    """Writes an index.

    Args:
        folder: made where it is missing.
        vectors: ``(rows, dimension)`` float32.
        about: kind, rows, dimension and digest.
        save_graph: writes the graph to a file and returns how many bytes it must have; None without a graph.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ABOUT).unlink(missing_ok=True)
        with whole_file(folder / VECTORS) as new:
            with new.open("wb") as stream:
                np.save(stream, vectors)
            digests = {VECTORS: _file_digest(new)}
        if save_graph is not None:
            digests[GRAPH] = _write_graph(folder / GRAPH, save_graph)
        whole = sealed({"about": {"format": FORMAT, **about, "files": digests}})
        with whole_file(folder / ABOUT) as new:
            new.write_text(json.dumps(whole, indent=1), encoding="utf-8")
    except OSError as error:
        raise OSError(
            f"index {folder} cannot be written ({error.strerror or error}): free some space, or choose another folder"
        ) from error


def _write_graph(file: Path, save_graph: Callable[[str], int]) -> str:
    """Writes the graph and gives its digest."""
    with whole_file(file) as new:
        size = save_graph(str(new))
        if not new.is_file() or new.stat().st_size != size:  # hnswlib does not look whether it could write
            raise OSError(f"{GRAPH} has not all of its {size:,} bytes")
        return _file_digest(new)


def has_index(folder: Path) -> bool:
    """Does an index lie there, whole or damaged later?"""
    return (folder / ABOUT).is_file()


def read_about(folder: Path) -> dict[str, Any]:
    """What ``index.json`` says; the other files are not looked at.

    Raises:
        FileNotFoundError: there is no index.
        ValueError: the file is damaged.
    """
    file = folder / ABOUT
    if not has_index(folder):
        raise FileNotFoundError(f"{folder}: no index lies there (no {ABOUT}); build one and save it")
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(about, dict) and "about" in about:  # an earlier version had no digest around it
            about = unsealed(about)["about"]
    except ValueError as error:
        raise _damaged(folder, ABOUT, str(error)) from None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise _damaged(folder, ABOUT, f"it does not describe an index of format {FORMAT}")
    return about


def read_vectors(folder: Path, about: dict[str, Any]) -> np.ndarray:
    """The vectors, memory-mapped, ``(rows, dimension)``.

    Raises:
        ValueError: they are damaged, or others than when the index was saved.
    """
    vectors: np.ndarray = np.load(_checked(folder, VECTORS, about), mmap_mode="r")
    return vectors


def graph_file(folder: Path, about: dict[str, Any]) -> Path:
    """Where the graph lies.

    Raises:
        ValueError: as for :func:`read_vectors`.
    """
    return _checked(folder, GRAPH, about)


def _checked(folder: Path, name: str, about: dict[str, Any]) -> Path:
    """A file as it was when the index was saved: it is read once, about a second for each GB.

    Raises:
        ValueError: it is missing, damaged, or of another index.
    """
    file = folder / name
    if not file.is_file():
        raise _damaged(folder, name, "it is missing")
    if _file_digest(file) != about["files"].get(name):
        raise _damaged(folder, name, "it is not what was saved")
    return file


def vectors_digest(vectors: np.ndarray) -> str:
    """Thirty-two hex digits of shape and content, read block by block.

    Example:
        >>> one = np.eye(2, dtype=np.float32)
        >>> vectors_digest(one) == vectors_digest(one.copy()), vectors_digest(one) == vectors_digest(one[::-1])
        (True, False)
    """
    digest = hashlib.blake2b(repr(vectors.shape).encode(), digest_size=16)
    for start in range(0, len(vectors), HASHED_ROWS):
        digest.update(np.ascontiguousarray(vectors[start : start + HASHED_ROWS], dtype="<f4").data)
    return digest.hexdigest()


def _file_digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _damaged(folder: Path, name: str, reason: str) -> ValueError:
    return ValueError(
        f"index {folder}: {name} is damaged ({reason}): remove the folder, and it is built anew"
    )
