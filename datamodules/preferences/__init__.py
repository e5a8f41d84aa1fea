"""Preferences: votes of clients, prompts to answer, pairs of completions and their labels by selectors.

Knows rows, text, clients and the federated datamodule; steps of recipes and judges use the labels.
"""

from fedlight.support.lazy import room_names

__getattr__ = room_names(__name__)
