"""LoRA adapters of several clients, stacked in one module, and dropout that ignores the other clients in the batch."""

from fedlight.support.lazy import lazy_names

_FILES = {"DropoutMasks": "dropout", "SeededDropout": "dropout", "StackedAdapters": "stacked_adapters"}

__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
