"""Rows of data sets: read from files and hubs, mapped to names, turned into votes and instructions; imports templates."""

from fedlight.support.lazy import room_names

_FILES = {"Holdout": "exclusion", "RowsError": "rows"}
__getattr__ = room_names(__name__, _FILES)
