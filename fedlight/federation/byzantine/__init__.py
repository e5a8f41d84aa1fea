"""Clients that lie, and aggregations that compare whole updates to see those that do."""

from fedlight.support.lazy import lazy_names

_FILES = {
    "Krum": "whole_updates",
    "Bulyan": "whole_updates",
    "GeometricMedian": "whole_updates",
    "FLTrust": "whole_updates",
    "Liars": "liars",
}
__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
