"""Scores measured during training: win rates and task scores of the global model and of clients' own models."""

from fedlight.support.lazy import room_names

__getattr__ = room_names(__name__)
