"""Algorithms whose clients make training data for themselves."""

from fedlight.support.lazy import lazy_names

_FILES = {
    "FewFedPIT": "fewfedpit",
    "FedMIT": "fedmit",
    "FewFedWeight": "fewfedweight",
    "LocalSelfGeneration": "local_self_generation",
}

__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
