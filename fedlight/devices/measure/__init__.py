"""``fedlight device measure``: a trial of this machine, and the profile of a device that it gives."""

from fedlight.support.lazy import lazy_names

_FILES = {"Sizes": "trial", "Trial": "trial", "measure": "trial", "profile_text": "profile"}

__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
