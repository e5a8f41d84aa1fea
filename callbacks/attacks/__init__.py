"""Attacks on the server's model and on clients' uploads that measure during training, and never change it."""

from fedlight.support.lazy import lazy_names

_FILES = {
    "Attack": "attack",
    "BackdoorSuccess": "backdoor_success",
    "ClientExtraction": "client_extraction",
    "DiscoverableMemorization": "discoverable_memorization",
    "MembershipInference": "membership_inference",
    "MemoryExtraction": "memory_extraction",
}

__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
