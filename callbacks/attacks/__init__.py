"""Privacy attacks on the server's model and on clients' uploads, made during training.

An attack reads uploads from the federated loop and the clients' rows from the datamodule. It never changes training.
"""

from fedlight.support.lazy import lazy_names

_FILES = {
    "Attack": "attack",
    "DiscoverableMemorization": "discoverable_memorization",
    "MembershipInference": "membership_inference",
    "MemoryExtraction": "memory_extraction",
}

__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
