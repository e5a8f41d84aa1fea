"""The server's side of retrieval: its public instructions as a searchable index."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from fedlight.datamodules.instructions.augmentation import Added
from fedlight.datamodules.rows.fields import instruction_text
from fedlight.datamodules.vectors.encoders import Encoder
from fedlight.datamodules.vectors.index_files import has_index
from fedlight.datamodules.vectors.vector_index import Hits, VectorIndex
from fedlight.support.files import refuse_unwritable
from fedlight.support.types import Fields

IndexKind = Literal["auto", "exact", "hnsw"]


def check_index_folder(folder: str | None) -> None:
    """Refuses a folder that takes no index, before anything is encoded; one that has an index may be read-only.

    Args:
        folder: see `public_index`.

    Raises:
        OSError: nothing can be written there.
    """
    if folder is not None and not has_index(Path(folder)):
        refuse_unwritable(Path(folder), "index_folder")


def public_index(
    encoder: Encoder, public: Sequence[Fields], kind: IndexKind, folder: str | None
) -> VectorIndex:
    """Encodes the public instructions and indexes them; the encoder's model is given back before the LLM is loaded.

    Args:
        encoder: of the server.
        public: rows.
        kind: see `VectorIndex.build`.
        folder: where the index is kept and looked for; None: nowhere.
    """
    vectors = encoder.encode([instruction_text(row) for row in public])
    encoder.release()
    return VectorIndex.build(vectors, kind) if folder is None else VectorIndex.open(folder, vectors, kind)


def rows_of(hits: Hits, public: Sequence[Fields]) -> list[Added]:
    """What was found, with its texts.

    Example:
        >>> import numpy as np
        >>> rows_of(Hits(np.array([1]), np.array([0.5])), [{"response": "a"}, {"response": "b"}])
        [Added(fields={'response': 'b'}, row=1, score=0.5)]
    """
    return [
        Added(public[row], row, score)
        for row, score in zip(hits.rows.tolist(), hits.scores.tolist(), strict=True)
    ]
