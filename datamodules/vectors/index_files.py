"""Folder that keeps the graph of an index, with digests that reveal damage and tell whose graph it is.

``graph.hnsw`` is hnswlib's file. ``index.json`` has the digests of the indexed vectors, of the graph and of itself; it is
removed first and written last, so a folder without it holds no graph. Vectors are not written: the encoder's cache has them.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from fedlight.support.files import read_json, sealed, whole_file, write_json

HASHED_ROWS = 16_384
ABOUT, GRAPH = "index.json", "graph.hnsw"


def has_graph(folder: Path) -> bool:
    """Return whether the folder holds a graph, even a damaged one."""
    return (folder / ABOUT).is_file()


def write_graph(folder: Path, graph: Any, vectors: str) -> None:
    """Write hnswlib's graph of the vectors with this digest.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ABOUT).unlink(missing_ok=True)
        with whole_file(folder / GRAPH) as new:
            graph.save_index(str(new))
            size = graph.index_file_size()
            if not new.is_file() or new.stat().st_size != size:  # hnswlib ignores write errors
                raise OSError(f"{GRAPH} has not all of its {size:,} bytes")
            digest = _file_digest(new)
        write_json(folder / ABOUT, sealed({"vectors": vectors, "graph": digest}))
    except OSError as error:
        raise OSError(
            f"index {folder} cannot be written ({error.strerror or error}): free some space, or choose another folder"
        ) from error


def graph_file(folder: Path, vectors: str) -> Path | None:
    """Return the file with the graph of the vectors with this digest; None where the folder has none of them.

    The check of its digest takes about a second per GB.

    Raises:
        ValueError: a file is damaged.
    """
    if not has_graph(folder):
        return None
    remedy = f"remove the folder {folder}, and the index is built anew"
    about, file = read_json(folder / ABOUT, remedy), folder / GRAPH
    if about.get("vectors") != vectors:
        return None
    if not file.is_file() or _file_digest(file) != about["graph"]:
        raise ValueError(f"{file} is damaged (it is not what was saved): {remedy}")
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
