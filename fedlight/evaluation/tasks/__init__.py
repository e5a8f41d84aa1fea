"""Benchmarks of a language model, one file each; ``task`` is their base, ``result`` their scores.

A task gets its rows and prompts from a datamodule's source, and its answers from any model of ``model``'s protocols.
"""

from fedlight.support.lazy import room_names

__getattr__ = room_names(__name__)
