"""Algorithms that treat a LoRA adapter as a pair of factors, and not as any two tensors."""

from fedlight.support.lazy import room_names

__getattr__ = room_names(__name__)
