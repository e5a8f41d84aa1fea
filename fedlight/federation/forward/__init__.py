"""Training by forward passes alone: gradients estimated from losses, and the algorithm whose clients send scalars."""

from fedlight.support.lazy import lazy_names

_FILES = {"ZerothOrder": "zeroth_order", "FedKSeed": "fedkseed"}

__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
