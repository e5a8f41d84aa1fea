"""Measures of models and their texts: win rates, agreement, coverage, extraction, and their intervals.

``tasks`` holds benchmarks, ``sandbox`` runs a model's code. The measures take numbers and texts, and know neither
Lightning nor the federated loop.
"""

from fedlight.support.lazy import room_names

_FILES = {"BothPositions": "judge"}
__getattr__ = room_names(__name__, _FILES)
