"""Scores measured during training: win rates and task scores of the global model and of clients' own models."""

from fedlight.support.lazy import lazy_names

_FILES = {
    "Forgetting": "forgetting",
    "SampleAnswers": "sample_answers",
    "TaskScores": "task_scores",
    "WinRate": "win_rate",
}

__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
