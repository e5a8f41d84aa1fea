"""Measures of models and their texts: win rates, agreement, coverage, extraction, and their intervals.

``tasks`` holds benchmarks, ``sandbox`` runs a model's code. The measures take numbers and texts, and know neither
Lightning nor the federated loop.
"""

from fedlight.support.lazy import lazy_names

_FILES = {"BothPositions": "judge", "DomainCoverage": "coverage", "Judge": "judge"}

__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
