"""Partitions of examples over clients, and their training and validation sets."""

from fedlight.support.lazy import room_names

__getattr__ = room_names(__name__)
