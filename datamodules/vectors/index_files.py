"""Files of a saved vector index, with digests that reveal damage.

A folder holds ``vectors.npy``, ``graph.hnsw`` for the approximate kind, and ``index.json`` with digests of both and of
itself. ``index.json`` is removed first and written last: a folder without it holds no index.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedlight.support.files import read_text, sealed, unsealed, whole_file

FORMAT = 1
HASHED_ROWS = 16_384
ABOUT, VECTORS, GRAPH = "index.json", "vectors.npy", "graph.hnsw"


def write_index(
    folder: Path, vectors: np.ndarray, about: dict[str, Any], save_graph: Callable[[str], int] | None
) -> None:
    """Write an index, described by ``about``: kind, rows, dimension and digest.

    ``save_graph`` writes the graph to a file and returns the size in bytes that the file must have.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ABOUT).unlink(missing_ok=True)  # written last: without it there is no index
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
    """Write the graph and return its digest."""
    with whole_file(file) as new:
        size = save_graph(str(new))
        if not new.is_file() or new.stat().st_size != size:  # hnswlib ignores write errors
            raise OSError(f"{GRAPH} has not all of its {size:,} bytes")
        return _file_digest(new)


def has_index(folder: Path) -> bool:
    """Return whether the folder holds an index, even a damaged one."""
    return (folder / ABOUT).is_file()


def read_about(folder: Path) -> dict[str, Any]:
    """Return the content of ``index.json``; the other files are not read.

    Raises:
        FileNotFoundError: the folder holds no index.
        ValueError: the file is damaged.
    """
    file = folder / ABOUT
    if not has_index(folder):
        raise FileNotFoundError(f"{folder} holds no index (no {ABOUT}): build one and save it")
    try:
        about = unsealed(json.loads(read_text(file)))["about"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damage_error(folder, ABOUT, str(error)) from None
    if about.get("format") != FORMAT:
        raise _damage_error(folder, ABOUT, f"it does not describe an index of format {FORMAT}")
    return about


def read_vectors(folder: Path, about: dict[str, Any]) -> np.ndarray:
    """Return the vectors, memory-mapped, ``(rows, dimension)``.

    Raises:
        ValueError: the file is missing, damaged or of another index.
    """
    vectors: np.ndarray = np.load(_check_file(folder, VECTORS, about), mmap_mode="r")
    return vectors


def graph_file(folder: Path, about: dict[str, Any]) -> Path:
    """Return the path of the graph; raises like `read_vectors`."""
    return _check_file(folder, GRAPH, about)


def _check_file(folder: Path, name: str, about: dict[str, Any]) -> Path:
    """Return the path of a file after a check of its digest, which takes about a second per GB."""
    file = folder / name
    if not file.is_file():
        raise _damage_error(folder, name, "it is missing")
    if _file_digest(file) != about["files"].get(name):
        raise _damage_error(folder, name, "it is not what was saved")
    return file


def vectors_digest(vectors: np.ndarray) -> str:
    """Return 32 hex digits of shape and content, read block by block.

    Examples:
        >>> vectors = np.eye(2, dtype=np.float32)
        >>> copy, backwards = vectors.copy(), vectors[::-1]
        >>> vectors_digest(vectors) == vectors_digest(copy), vectors_digest(vectors) == vectors_digest(backwards)
        (True, False)
    """
    digest = hashlib.blake2b(repr(vectors.shape).encode(), digest_size=16)
    for start in range(0, len(vectors), HASHED_ROWS):
        # Little-endian, so that machines agree.
        digest.update(np.ascontiguousarray(vectors[start : start + HASHED_ROWS], dtype="<f4").data)
    return digest.hexdigest()


def _file_digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _damage_error(folder: Path, name: str, reason: str) -> ValueError:
    return ValueError(
        f"index {folder}: {name} is damaged ({reason}): remove the folder, and it is built anew"
    )
