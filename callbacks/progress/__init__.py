"""Progress of a run: a live line with round, client and time left, and a summary at its end."""

from fedlight.support.lazy import lazy_names

_FILES = {"RoundProgress": "round_progress"}

__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
