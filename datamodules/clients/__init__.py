"""Partitions of examples over clients, and their training and validation sets."""

from fedlight.support.lazy import lazy_names

_FILES = {
    "Partition": "partition",
    "PartitionByField": "partition",
    "iid": "partition",
    "dirichlet": "partition",
    "by_key": "partition",
    "FewShot": "few_shot",
}

__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
