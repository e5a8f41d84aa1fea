"""Cache of text vectors on disk, by the content of the text and the identity of the encoder.

Each encoder has a folder of safetensors files that are written once and never changed. A file holds the keys (hashes) of
up to a thousand texts and their vectors, with a checksum of each in the metadata. A file appears whole or not at all. So
several processes may share a cache without locks, and an interrupted encoding keeps all finished files. A damaged file is
removed and its texts are encoded again.
"""

import hashlib
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from fedlight.support.files import whole_file

KEY_BYTES = 16
ENDING = ".safetensors"


class EmbeddingCache:
    """Cached vectors of one encoder, in a folder for the caches of all encoders; another identity never sees these vectors.

    The folder, ``~`` allowed, is created by the first write.
    """

    def __init__(self, folder: str | Path, identity: str) -> None:
        readable = re.sub(r"[^A-Za-z0-9.-]+", "-", identity)[:40].strip("-.")
        digest = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
        self.folder = Path(folder).expanduser() / f"{readable}-{digest}"
        self.identity = identity
        self.damaged = 0  # files that were found damaged and removed
        self._opened: dict[Path, np.ndarray] = {}

    def dimension(self) -> int | None:
        """Return the length of a vector; None if no vector is cached."""
        read = (self._read(file, "vectors") for file, _ in self._blocks())
        return next((vectors.shape[1] for vectors in read if vectors is not None), None)

    def find(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the vectors of distinct texts, and whether each text was found; None if none was.

        Vectors are ``(texts, dimension)`` float32; the rows of missing texts are not filled.
        """
        keys = text_keys(texts)
        order = np.argsort(keys)
        in_order = keys[order]  # sorted, for searchsorted
        vectors, known = None, np.zeros(len(texts), dtype=bool)  # [texts]
        for file, block_keys in self._blocks() if texts else ():
            # A key above all others has its place behind the last one.
            places = np.minimum(np.searchsorted(in_order, block_keys), len(texts) - 1)
            rows = np.flatnonzero(in_order[places] == block_keys)
            texts_here = order[places[rows]]
            if known[texts_here].all():  # its vectors need not be read
                continue
            values = self._read(file, "vectors")
            if values is None or (vectors is not None and vectors.shape[1] != values.shape[1]):
                continue
            if vectors is None:
                vectors = np.empty((len(texts), values.shape[1]), dtype=np.float32)
            vectors[texts_here], known[texts_here] = values[rows], True
        return None if vectors is None else (vectors, known)

    def add(self, texts: Sequence[str], vectors: np.ndarray) -> None:
        """Write the vectors ``(texts, dimension)`` of distinct texts, at least one, into one file.

        Raises:
            OSError: the folder cannot be written, or the disk is full; earlier files stay.
        """
        from safetensors.numpy import save

        keys = text_keys(texts)
        block: dict[str, np.ndarray] = {
            "keys": keys.view(np.uint8).reshape(-1, KEY_BYTES),
            "vectors": np.ascontiguousarray(vectors, dtype=np.float32),
        }
        checksums = {name: str(zlib.crc32(values.data)) for name, values in block.items()}
        # Named by its texts: two processes that encode the same texts write the same file.
        file = self.folder / f"{hashlib.blake2b(keys.data, digest_size=12).hexdigest()}{ENDING}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            about = self.folder / "encoder.txt"  # for people: the folder's name is cut
            if not about.is_file():
                about.write_text(self.identity + "\n", encoding="utf-8")
            with whole_file(file) as unfinished:
                unfinished.write_bytes(save(block, metadata=checksums))
        except OSError as error:
            raise OSError(
                error.errno,
                f"{file} of the embedding cache cannot be written ({error.strerror}): free some space, or set the "
                "encoder's `cache` to another folder; cached vectors stay, and the same command continues from them",
            ) from error

    def _blocks(self) -> Iterator[tuple[Path, np.ndarray]]:
        """Yield each file with its keys ``(rows,)``, files of other processes too; no file's keys are read twice."""
        for file in sorted(self.folder.glob(f"*{ENDING}")):
            if file not in self._opened and (keys := self._read(file, "keys")) is not None:
                self._opened[file] = keys.view(f"S{KEY_BYTES}").ravel()
            if file in self._opened:
                yield file, self._opened[file]

    def _read(self, file: Path, name: str) -> np.ndarray | None:
        """Return ``keys`` or ``vectors`` of a file; None if the file is missing, or damaged and thus removed."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(file, framework="np") as block:
                values: np.ndarray = block.get_tensor(name)
                if str(zlib.crc32(values.data)) == block.metadata()[name]:
                    return values
        except FileNotFoundError:
            return None
        except (SafetensorError, KeyError, TypeError):  # the last two of the metadata
            pass
        self.damaged += 1
        self._opened.pop(file, None)
        file.unlink(missing_ok=True)
        return None


def text_keys(texts: Sequence[str]) -> np.ndarray:
    """Return 16 bytes for each text, equal for equal texts alone, ``(texts,)``.

    Examples:
        >>> first, second, again = text_keys(["x", "y", "x"])
        >>> bool(first == again), bool(first == second)
        (True, False)
    """
    digests = (
        hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=KEY_BYTES) for text in texts
    )
    return np.frombuffer(b"".join(digest.digest() for digest in digests), dtype=f"S{KEY_BYTES}")
