"""Time that a run will still take, from its finished rounds and validations, which are timed apart.

A validation may take as long as a round and come every tenth round alone, so the mean of both together would be wrong in
either. The first round loads and compiles in its first batch, so that batch tells nothing of the others.
"""

import time
from collections.abc import Callable, Sequence


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
        self._rounds: list[
            float
        ] = []  # of each finished round, to the start of the next, without its validation
        self._validations: list[float] = []  # of each finished round that had one
        self._begun: float | None = None  # moment of the round under way
        self._first_batch = self._last_batch = 0.0  # moments at which they were done
        self._batches = 0
        self._in_round = 0.0  # seconds of validation in it

    def round_begins(self) -> None:
        """Note that a round begins, and with it that the one before is over."""
        now = self._clock()
        if self._begun is not None:
            self._rounds.append(self._round(now))
            self._validations += [self._in_round] if self._in_round else []
        self._begun, self._batches, self._in_round = now, 0, 0.0

    def batch_ends(self) -> None:
        """Note that a batch of the round is done."""
        self._batches += 1
        self._last_batch = self._clock()
        if self._batches == 1:
            self._first_batch = self._last_batch

    def validation_begins(self) -> None:
        """Note that the model is validated."""
        self._in_round -= self._clock()

    def validation_ends(self) -> None:
        """Note that it is validated."""
        self._in_round += self._clock()

    def is_whole(self, validations_left: int) -> bool:
        """Tell whether the estimate has all in it: how long a validation takes is not known before the first one."""
        return not validations_left or bool(self._validations) or self._in_round > 0

    def seconds(self, share: float, rounds_after: int, validations_left: int) -> float | None:
        """Return the seconds left of the round under way and of all rounds after it; None where nothing is known yet.

        A round takes the mean of the finished ones without the first, what lies between two rounds included. Until there is
        such, it takes what the batches of the first round took, but for the very first one.

        Args:
            share: of the round's batches that is done, in [0, 1]; at 1 the round and its validation are over.
            rounds_after: rounds after the one under way.
            validations_left: validations that are still to come, that of the round under way included.
        """
        if self._begun is None:
            return None
        now = self._clock()
        rounds, validations = self._rounds, self._validations
        if share >= 1:
            rounds = [*rounds, self._round(now)]
            validations = [*validations, *([self._in_round] if self._in_round else [])]
        elapsed = now - self._begun
        each = _usual(rounds) if rounds else self._by_batches(elapsed, share)
        if each is None:
            return None
        rest = max(each - elapsed, 0.0) if share < 1 else 0.0
        return rest + rounds_after * each + validations_left * (_usual(validations) or 0.0)

    def _round(self, now: float) -> float:
        """Return the seconds of the round that is over; of the run's first one with a usual batch in place of its first."""
        assert self._begun is not None
        if self._rounds or self._batches < 2:
            return now - self._begun - self._in_round
        a_batch = (self._last_batch - self._first_batch) / (self._batches - 1)
        return a_batch + now - self._first_batch - self._in_round

    def _by_batches(self, elapsed: float, share: float) -> float | None:
        """Return the seconds of a round by those of its batches so far, without the first as soon as there is another."""
        if share <= 0:
            return None
        if self._batches < 2:
            return elapsed / share
        return (self._last_batch - self._first_batch) / (self._batches - 1) * self._batches / share


def _usual(seconds: Sequence[float]) -> float | None:
    """Return the mean without the first, unless it is the only one; None without any.

    Examples:
        >>> _usual([30.0, 10.0, 14.0]), _usual([30.0]), _usual([])
        (12.0, 30.0, None)
    """
    usual = seconds[1:] or seconds
    return sum(usual) / len(usual) if usual else None
