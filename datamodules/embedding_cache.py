"""Vectors of texts on disk, found again by the content of the text and the identity of the encoder.

A cache is a folder for each encoder, of files that are written once and never changed: the keys (hashes) of up to a
thousand texts, then their vectors, both with checksums. A file appears whole or not at all, so several processes may share
a cache without locks, and an interrupted encoding keeps all that was finished. A damaged file is removed and its texts are
encoded again.
"""

import hashlib
import os
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedlight.federation.whole_files import whole_file

HEADER = struct.Struct("<16sQQII")  # magic, rows, dimension, checksums of keys and of vectors
MAGIC = b"fedlight vectors"
KEY_BYTES = 16
ENDING = ".vectors"


class Block(NamedTuple):
    """One file of a cache, its vectors not read yet.

    Attributes:
        file: where it lies.
        keys: of its texts, ``(rows,)`` of 16 bytes.
        dimension: numbers in a vector.
        checksum: CRC-32 of the vectors.
    """

    file: Path
    keys: np.ndarray
    dimension: int
    checksum: int


class EmbeddingCache:
    """The vectors that one encoder has made.

    Args:
        folder: for the caches of all encoders, ``~`` allowed; made when something is written.
        identity: of the encoder; another identity never sees these vectors.

    Attributes:
        damaged: files that were found damaged and removed.
    """

    def __init__(self, folder: str | Path, identity: str) -> None:
        readable = re.sub(r"[^A-Za-z0-9.-]+", "-", identity)[:40].strip("-.")
        digest = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
        self.folder = Path(folder).expanduser() / f"{readable}-{digest}"
        self.identity = identity
        self.damaged = 0
        self._opened: dict[Path, Block] = {}

    def dimension(self) -> int | None:
        """Numbers in a vector; None where there is none yet."""
        return next((block.dimension for block in self._blocks()), None)

    def find(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray] | None:
        """What there is of some texts.

        Args:
            texts: each once.

        Returns:
            Vectors ``(texts, dimension)`` float32, and for each text whether it was found ``(texts,)``; the rows of
            others are not filled. None where no text was found.
        """
        keys = text_keys(texts)
        order = np.argsort(keys)
        in_order = keys[order]
        vectors, known = None, np.zeros(len(texts), dtype=bool)
        for block in self._blocks() if texts else ():
            places = np.minimum(np.searchsorted(in_order, block.keys), len(texts) - 1)
            rows = np.flatnonzero(in_order[places] == block.keys)
            texts_here = order[places[rows]]
            if known[texts_here].all():
                continue
            values = self._read(block)
            if values is None or (vectors is not None and vectors.shape[1] != block.dimension):
                continue
            if vectors is None:
                vectors = np.empty((len(texts), block.dimension), dtype=np.float32)
            vectors[texts_here], known[texts_here] = values[rows], True
        return None if vectors is None else (vectors, known)

    def add(self, texts: Sequence[str], vectors: np.ndarray) -> None:
        """Keeps the vectors of some texts, in one file.

        Args:
            texts: each once, at least one.
            vectors: ``(texts, dimension)``.

        Raises:
            OSError: the folder cannot be written, or the disk is full; what was added before stays.
        """
        keys = text_keys(texts)
        values = np.ascontiguousarray(vectors, dtype="<f4")
        header = HEADER.pack(MAGIC, *values.shape, zlib.crc32(keys.data), zlib.crc32(values.data))
        # Named by its texts: two processes that encode the same ones write the same file.
        file = self.folder / f"{hashlib.blake2b(keys.data, digest_size=12).hexdigest()}{ENDING}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            about = self.folder / "encoder.txt"
            if not about.is_file():
                about.write_text(self.identity + "\n", encoding="utf-8")
            with whole_file(file) as unfinished, unfinished.open("wb") as stream:
                stream.write(header)
                stream.write(keys.data)
                stream.write(values.data)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{file} of the embedding cache cannot be written ({error.strerror}): free some space, or set the "
                "encoder's `cache` to another folder; what is there stays, and the same command goes on from it",
            ) from error

    def _blocks(self) -> Iterator[Block]:
        """Files are looked for each time, as another process may have added some, but opened once."""
        for file in sorted(self.folder.glob(f"*{ENDING}")):
            block = self._opened.get(file) or self._open(file)
            if block is not None:
                self._opened[file] = block
                yield block

    def _open(self, file: Path) -> Block | None:
        """Header and keys; None for a file that has gone, or is damaged and removed."""
        try:
            with file.open("rb") as stream:
                head = stream.read(HEADER.size)
                if len(head) == HEADER.size:
                    magic, rows, dimension, of_keys, of_vectors = HEADER.unpack(head)
                    size = HEADER.size + rows * (KEY_BYTES + 4 * dimension)
                    if magic == MAGIC and rows and dimension and size == os.fstat(stream.fileno()).st_size:
                        keys = np.frombuffer(stream.read(rows * KEY_BYTES), dtype=f"S{KEY_BYTES}")
                        if zlib.crc32(keys.data) == of_keys:
                            return Block(file, keys, dimension, of_vectors)
        except FileNotFoundError:
            return None
        self._discard(file)
        return None

    def _read(self, block: Block) -> np.ndarray | None:
        """The vectors of a file ``(rows, dimension)``; None as for :meth:`_open`."""
        rows = len(block.keys)
        try:
            values = np.fromfile(
                block.file, dtype="<f4", count=rows * block.dimension, offset=HEADER.size + rows * KEY_BYTES
            )
        except FileNotFoundError:
            return None
        if len(values) != rows * block.dimension or zlib.crc32(values.data) != block.checksum:
            self._discard(block.file)
            return None
        return values.reshape(rows, block.dimension)

    def _discard(self, file: Path) -> None:
        self.damaged += 1
        self._opened.pop(file, None)
        file.unlink(missing_ok=True)


def text_keys(texts: Sequence[str]) -> np.ndarray:
    """Sixteen bytes for each text, equal for equal texts alone, ``(texts,)``.

    Example:
        >>> one, other, again = text_keys(["x", "y", "x"])
        >>> bool(one == again), bool(one == other)
        (True, False)
    """
    digests = (
        hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=KEY_BYTES) for text in texts
    )
    return np.frombuffer(b"".join(digest.digest() for digest in digests), dtype=f"S{KEY_BYTES}")
