"""``fedlight plan``: which devices could take part in a run, from its config alone."""

from fedlight.support.lazy import lazy_names

_FILES = {"known_shapes": "shapes", "make_plan": "plan"}

__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
