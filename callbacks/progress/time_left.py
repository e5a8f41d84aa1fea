"""How long a run will still take, from how long its rounds have taken."""

from collections.abc import Sequence


def seconds_left(rounds: Sequence[float], elapsed: float, share: float, rounds_after: int) -> float | None:
    """The rest of the round under way and all rounds behind it.

    A round takes what the rounds before it took on average, validation and whatever else lay between them included. The
    first is left out of the average as soon as there is another: things are loaded and compiled in it. As long as none is
    finished, the one under way stands for the others.

    Args:
        rounds: seconds of each finished round, from its start to the next one's.
        elapsed: seconds since the round under way began; infinite where it has just ended.
        share: how much of its batches is done, in [0, 1].
        rounds_after: rounds behind the one under way.

    Returns:
        Seconds, or None where nothing is known yet.

    Example:
        >>> seconds_left([30.0, 10.0, 14.0], elapsed=5.0, share=0.5, rounds_after=2)
        31.0
        >>> seconds_left([30.0, 10.0, 14.0], elapsed=float("inf"), share=1.0, rounds_after=2)
        24.0
        >>> seconds_left([], elapsed=5.0, share=0.25, rounds_after=2)
        55.0
        >>> seconds_left([], elapsed=5.0, share=0.0, rounds_after=2) is None
        True
    """
    if rounds:
        usual = rounds[1:] or rounds
        each = sum(usual) / len(usual)
    elif share > 0:
        each = elapsed / share
    else:
        return None
    return max(each - elapsed, 0.0) + rounds_after * each
