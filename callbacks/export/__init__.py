"""Adapters and predictions, written to files in formats that other programs read."""

from fedlight.support.lazy import room_names

__getattr__ = room_names(__name__)
