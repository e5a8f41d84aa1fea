"""Progress of a run: a live line with round, client and time left, and a summary at its end."""

from fedlight.support.lazy import room_names

__getattr__ = room_names(__name__)
