"""Vectors of texts: encoders, a cache on disk, clusters, nearest-neighbour indexes, retrieval and selection of centres."""

from fedlight.support.lazy import lazy_names

_FILES = {
    "Encoder": "encoders",
    "HashedEncoder": "encoders",
    "SentenceEncoder": "encoders",
    "PseudoLabels": "clusters",
    "VectorIndex": "vector_index",
}

__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
