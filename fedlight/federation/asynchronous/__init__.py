"""Asynchronous rounds: a server step for every so many arrivals, whoever they are, and who arrives when.

`FedBuff` has the settings and weighs updates by their staleness; `next_step` is the schedule on the virtual clock.
"""

from fedlight.support.lazy import lazy_names

# fmt: off
_FILES = {
    "FedBuff": "fedbuff", "Assignment": "schedule", "ServerStep": "schedule", "next_step": "schedule",
}
# fmt: on
__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
