"""What LESS has scored so far, on disk, so that a run that was killed goes on: one small file for a block of rows.

The files lie in ``FOLDER/KEY/``, the key standing for settings, seed and texts, so that other runs may share the folder.
"""

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fedlight.datamodules.instructions.augmentation_record import digest_of
from fedlight.support.files import sealed_bytes, unsealed_bytes, write_whole
from fedlight.support.types import Fields


class ScoredBlocks:
    """Scores by epoch and block of rows.

    Args:
        folder: of this run alone; None keeps nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def read(self, epoch: int, block: int, shape: tuple[int, int]) -> np.ndarray | None:
        """The scores of a block, or None where they are to be made: there are none, or the file is damaged."""
        if self.folder is None:
            return None
        try:
            found: np.ndarray = np.load(io.BytesIO(unsealed_bytes(self._file(epoch, block).read_bytes())))
        except (OSError, ValueError):
            return None
        return found if found.shape == shape else None

    def write(self, epoch: int, block: int, scores: np.ndarray) -> None:
        """Keeps the scores ``(rows, clients)`` of a block; whoever reads sees all of them or none."""
        if self.folder is None:
            return
        file = io.BytesIO()
        np.save(file, scores)
        write_whole(self._file(epoch, block), sealed_bytes(file.getvalue()))

    def _file(self, epoch: int, block: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{epoch}-{block}.npy"


def scored_blocks(
    folder: str | None,
    settings: Mapping[str, object],
    clients: Mapping[str, Sequence[Fields]],
    public: Sequence[Fields],
    seed: int,
) -> ScoredBlocks:
    """The blocks of a run.

    Args:
        folder: of all runs; None keeps nothing.
        settings: plain values that the scores depend on, besides rows and seed.
        clients: each client's rows.
        public: the rows that are scored.
        seed: of the run.
    """
    if folder is None:
        return ScoredBlocks(None)
    texts = [(client, digest_of(rows)) for client, rows in clients.items()]
    whole = json.dumps([settings, seed, texts, digest_of(public)], sort_keys=True)
    return ScoredBlocks(
        Path(folder).expanduser() / hashlib.blake2b(whole.encode(), digest_size=8).hexdigest()
    )
