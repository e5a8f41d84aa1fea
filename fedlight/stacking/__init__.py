"""LoRA adapters of several clients, stacked in one module, and dropout that does not depend on who is in the batch."""

from fedlight.support.lazy import lazy_names

_FILES = {"DropoutMasks": "dropout", "SeededDropout": "dropout", "StackedAdapters": "stacked_adapters"}

__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
