"""LESS, which selects public rows by the gradients they cause.

It knows ``fedlight.modules.SFTModule``, whose gradients it takes, and the datamodules' encoding of rows.
"""

from fedlight.support.lazy import lazy_names

_FILES = {"LESS": "less"}

__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
