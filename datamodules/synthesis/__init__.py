"""Synthesis: training data that clients generate for themselves, its filters, its record and the datamodule that serves it.

Knows instructions, text and the model's interface `AnswersPrompts`; algorithms drive it through `SynthesizesData`.
"""

from fedlight.support.lazy import room_names

_FILES = {"Candidate": "synthesis"}
__getattr__ = room_names(__name__, _FILES)
