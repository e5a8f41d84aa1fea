"""Vectors of texts: encoders, a cache on disk, clusters, nearest-neighbour indexes, retrieval and selection of centres."""

from fedlight.support.lazy import room_names

_FILES = {"Encoder": "encoders", "PseudoLabels": "clusters", "VectorIndex": "vector_index"}
__getattr__ = room_names(__name__, _FILES)
