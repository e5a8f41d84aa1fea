"""Attacks on the server's model and on clients' uploads that measure during training, and never change it."""

from fedlight.support.lazy import room_names

__getattr__ = room_names(__name__)
