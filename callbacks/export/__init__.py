"""Adapters and predictions, written to files in formats that other programs read."""

from fedlight.support.lazy import lazy_names

_FILES = {"AdapterExport": "adapter_export", "PredictionWriter": "prediction_writer"}

__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
