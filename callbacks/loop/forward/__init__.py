"""Visits that are trained by forward passes alone.

`forward_visits` says which visits of a run these are and what they weigh, `forward_steps` trains a group of them, and
`refusals` holds what cannot be trained so.
"""

from fedlight.support.lazy import lazy_names

_FILES = {"ForwardVisits": "forward_visits", "ForwardSteps": "forward_steps"}

__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
