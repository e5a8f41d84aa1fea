"""Visits of a round that are trained side by side.

`bundles` forms the groups, `side_by_side` trains one, `at_once` says how large they are, and `refusals` what cannot be
trained so.
"""

from fedlight.support.lazy import lazy_names

_FILES = {"AtOnce": "at_once", "SideBySide": "side_by_side"}

__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
