"""Training by forward passes alone: gradients estimated from losses, and the algorithm whose clients send scalars."""

from fedlight.support.lazy import room_names

__getattr__ = room_names(__name__)
