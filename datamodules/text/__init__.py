"""Text for language models: templates, token ids, encoded examples and their batches."""

from fedlight.support.lazy import lazy_names

_FILES = {"Template": "templates"}

__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
