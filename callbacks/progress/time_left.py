"""Time that a run will still take, from its finished rounds and validations, which are timed apart.

The first round loads and compiles in its first batch, so that batch does not predict the others.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

BETWEEN_ROUNDS = ("fedlight.callbacks.attacks", "fedlight.callbacks.scores")


def works_between_rounds(kind: type) -> bool:
    """Return whether objects of a class are callbacks with long work at the end of a round: attacks and scores."""
    return any(base.__module__.startswith(BETWEEN_ROUNDS) for base in kind.__mro__)


class Usual(NamedTuple):
    """Durations in seconds; the first does not count unless it is the only one.

    Examples:
        >>> Usual().and_then(30.0).mean, Usual().and_then(30.0).and_then(10.0).and_then(14.0).mean, Usual().mean
        (30.0, 12.0, 0.0)
    """

    number: int = 0
    total: float = 0.0
    """Sum of those that count."""

    def and_then(self, seconds: float) -> "Usual":
        """Return the durations with one more."""
        # The second takes the place of the first, which loads and compiles.
        return Usual(self.number + 1, seconds if self.number < 2 else self.total + seconds)

    @property
    def mean(self) -> float:
        """Mean of those that count; 0 without any."""
        return self.total / max(1, self.number - 1)


class TimeLeft:
    """Clock of a fit, told when rounds, batches and validations begin and end.

    Args:
        clock: seconds from any moment on; None: that of the machine.

    Examples:
        >>> now = [0.0]
        >>> left = TimeLeft(lambda: now[0])
        >>> def one_round(*batches, validation=0.0):
        ...     left.round_begins()
        ...     for seconds in batches:
        ...         now[0] += seconds
        ...         left.batch_ends()
        ...     left.validation_begins()
        ...     now[0] += validation
        ...     left.validation_ends()
        >>> one_round(9.0, 2.0)
        >>> left.seconds(1.0, rounds_after=3, validations_left=2), left.is_whole(validations_left=2)  # 3 x 2 x 2
        (12.0, False)
        >>> one_round(2.0, 3.0, validation=60.0)
        >>> left.seconds(1.0, rounds_after=2, validations_left=1), left.is_whole(validations_left=1)  # 2 x 5 + 60
        (70.0, True)
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or time.monotonic
        self._rounds = Usual()  # of finished rounds, to the start of the next, without their validations
        # Apart: a validation may take as long as a round, and come every tenth round alone.
        self._validations = Usual()
        self._begun: float | None = None  # moment of the round under way
        self._first_batch = self._last_batch = 0.0  # moments of their ends
        self._batches = 0
        self._in_round = 0.0  # seconds of validation in it

    def round_begins(self) -> None:
        """Note that a round begins, and with it that the one before is over."""
        now = self._clock()
        if self._begun is not None:
            self._rounds, self._validations = self._with_this_round(now)
        self._begun, self._batches, self._in_round = now, 0, 0.0

    def batch_ends(self) -> None:
        """Note that a batch of the round is done."""
        self._batches += 1
        self._last_batch = self._clock()
        if self._batches == 1:
            self._first_batch = self._last_batch

    def validation_begins(self) -> None:
        """Note that the model is validated."""
        self._in_round -= self._clock()  # its end is added later

    def validation_ends(self) -> None:
        """Note that it is validated."""
        self._in_round += self._clock()

    def is_whole(self, validations_left: int) -> bool:
        """Tell whether the estimate has all in it: how long a validation takes is not known before the first one."""
        return not validations_left or self._validations.number > 0 or self._in_round > 0

    def seconds(self, share: float, rounds_after: int, validations_left: int) -> float | None:
        """Return the seconds left of the round under way and of all rounds after it; None where nothing is known yet.

        A round takes the mean of the finished ones without the first, time between two rounds included. Until one is
        finished, it is estimated from the first round's batches without the very first one. ``share`` of the round's
        batches, in [0, 1], is done, at 1 with its validation; ``validations_left`` includes that of the round under way.
        """
        if self._begun is None:
            return None
        now = self._clock()
        rounds, validations = self._rounds, self._validations
        if share >= 1:
            rounds, validations = self._with_this_round(now)
        elapsed = now - self._begun
        each = rounds.mean if rounds.number else self._by_batches(elapsed, share)
        if each is None:
            return None
        rest = max(each - elapsed, 0.0) if share < 1 else 0.0  # a round may take longer than the mean
        return rest + rounds_after * each + validations_left * validations.mean

    def _with_this_round(self, now: float) -> "tuple[Usual, Usual]":
        """Return the durations with those of the round that is over, and of its validation if it had one."""
        validations = self._validations.and_then(self._in_round) if self._in_round else self._validations
        return self._rounds.and_then(self._round(now)), validations

    def _round(self, now: float) -> float:
        """Return the seconds of the round that is over; of the run's first one with a usual batch in place of its first."""
        assert self._begun is not None
        if self._rounds.number or self._batches < 2:
            return now - self._begun - self._in_round
        a_batch = (self._last_batch - self._first_batch) / (self._batches - 1)
        return a_batch + now - self._first_batch - self._in_round

    def _by_batches(self, elapsed: float, share: float) -> float | None:
        """Return the seconds of a round by those of its batches so far, without the first as soon as there is another."""
        if share <= 0:
            return None
        if self._batches < 2:
            return elapsed / share  # the first batch is all there is
        return (self._last_batch - self._first_batch) / (self._batches - 1) * self._batches / share
