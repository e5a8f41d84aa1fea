"""Watch for threads that wait for a core: a step of several threads takes a multiple of its time beside busy processes.

Threads of an operator wait for each other at its end, and those that wait spin: they take the cores that the last one needs.
On two cores, two threads took 4 times as long as one beside other processes that kept 1.3 cores busy, and 10 to 30 times as
long beside 1.7. Linux counts how long each thread was ready to run without a core; elsewhere nothing is watched.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from lightning.pytorch.utilities import rank_zero_info

from fedlight.callbacks.loop.parts.part import Part
from fedlight.callbacks.loop.run import Run
from fedlight.callbacks.loop.visits.visit import OpenGroup

PERIOD_SECONDS = 5.0
"""Time between two looks, of which each reads a file for each thread, a millisecond in all."""
MOST_WAITING = 0.5
"""Threads waiting at a time, on average, above which fewer threads are faster."""


def fewer_threads(threads: int, seconds: float, waited_seconds: float) -> int | None:
    """Return the number of threads that is likely faster, None if the present number is fine.

    Args:
        threads: of torch, at least 1.
        seconds: length of a period, above 0.
        waited_seconds: time in the period that the process's threads waited for a core, summed over the threads.

    Examples:
        >>> fewer_threads(2, 3.0, 3.9), fewer_threads(8, 5.0, 5.1), fewer_threads(2, 3.0, 0.1), fewer_threads(1, 3.0, 2.4)
        (1, 7, None, None)
    """
    waiting = waited_seconds / seconds
    return max(1, round(threads - waiting)) if threads > 1 and waiting > MOST_WAITING else None


def waited_seconds(tasks: Path = Path("/proc/self/task")) -> float | None:
    """Return how long the process's threads have waited for a core so far, None where the system does not count it.

    Source: "run_delay" in https://docs.kernel.org/scheduler/sched-stats.html, the second of three numbers, in nanoseconds.
    """
    waited = []
    try:
        for thread in os.listdir(tasks):
            try:
                waited.append(int(Path(tasks, thread, "schedstat").read_text().split()[1]))
            except (FileNotFoundError, ProcessLookupError):  # it has ended, or the kernel does not count
                continue
    except (OSError, IndexError, ValueError):
        return None
    return sum(waited) / 1e9 if waited else None


class CoreWatch(Part):
    """Advice, once in a run, to use fewer threads where other processes keep the cores busy.

    Args:
        clock: function that returns the seconds since a fixed moment.
        waited: function that returns the seconds that the process's threads have waited for a core, None if unknown.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, waited: Callable[[], float | None] = waited_seconds
    ) -> None:
        self._clock, self._waited = clock, waited
        self._next = float("-inf")
        self._began: tuple[float, float] | None = None

    def after_batch(self, run: Run, group: OpenGroup) -> None:
        """Give the advice if it is due; cheap enough to call after every step."""
        now = self._clock()
        if now < self._next:
            return
        waited = self._waited()
        if waited is None:
            self._next = float("inf")  # this system counts no waiting
            return
        before, self._began = self._began, (now, waited)
        self._next = now + PERIOD_SECONDS
        if before is None:
            return
        threads, seconds, delay = torch.get_num_threads(), now - before[0], waited - before[1]
        number = fewer_threads(threads, seconds, delay)
        if number is not None:
            self._next = float("inf")
            rank_zero_info(
                f"other processes keep the cores busy: at any time {delay / seconds:.1f} threads of this process wait for "
                f"one, while the others spin, so that a step of torch's {threads} threads takes a multiple of its time: "
                f"give fedlight --threads {number}, or call torch.set_num_threads({number})"
            )
