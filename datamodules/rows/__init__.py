"""Rows of data sets: read from files and hubs, mapped to names, turned into votes and instructions; imports templates."""

from fedlight.support.lazy import lazy_names

_FILES = {
    "TaskRows": "task_rows",
    "Canaries": "canaries",
    "PoisonedVotes": "poison",
    "Backdoor": "poison",
    "Holdout": "exclusion",
    "RowsError": "rows",
}

__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
