"""Privacy attacks on the server's model and on clients' uploads during training; they never change the training."""

from fedlight.support.lazy import lazy_names

_FILES = {
    "Attack": "attack",
    "DiscoverableMemorization": "discoverable_memorization",
    "MembershipInference": "membership_inference",
    "MemoryExtraction": "memory_extraction",
}

__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
