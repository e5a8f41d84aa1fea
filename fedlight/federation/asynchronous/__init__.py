"""Asynchronous rounds: a server step for every so many arrivals, whoever they are, and who arrives when.

`FedBuff` has the settings and weighs updates by their staleness; `next_step` is the schedule on the virtual clock.
"""

from fedlight.support.lazy import room_names

_FILES = {"Assignment": "schedule", "ServerStep": "schedule", "next_step": "schedule"}
__getattr__ = room_names(__name__, _FILES)
