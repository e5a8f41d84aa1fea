"""Vectors of texts: encoders, a cache on disk, nearest-neighbour indexes, retrieval and selection of client centres.

Knows the rows, the clusters of clients and the federated datamodule; algorithms that retrieve use it.
"""

from fedlight.support.lazy import lazy_names

_FILES = {
    "Encoder": "encoders",
    "HashedEncoder": "encoders",
    "SentenceEncoder": "encoders",
    "EmbeddingDataModule": "embeddings",
    "VectorIndex": "vector_index",
}

__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
