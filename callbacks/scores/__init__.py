"""Scores measured during training: win rates and task scores of the global model and of clients' own models.

The measures are those of ``fedlight.evaluation``; what a score runs on is read from the federated loop.
"""

from fedlight.support.lazy import lazy_names

_FILES = {"TaskScores": "task_scores", "WinRate": "win_rate"}

__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
