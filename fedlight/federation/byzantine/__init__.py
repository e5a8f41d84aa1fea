"""Clients that lie, and aggregations that compare whole updates to see those that do."""

from fedlight.support.lazy import room_names

__getattr__ = room_names(__name__)
