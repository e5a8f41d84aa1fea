"""Algorithms whose clients make training data for themselves."""

from fedlight.support.lazy import room_names

__getattr__ = room_names(__name__)
