"""Work around the rounds, such as generation, that the processes of a team share, with the same results on any number.

Every process of the team calls these functions with equal arguments, in the same order. The result for an item must not
depend on the items before it and must not advance a global random stream.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from fedlight.processes.team import current_team

T = TypeVar("T")
R = TypeVar("R")


def for_each(work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Return ``work(item)`` for each item, in their order; the team's processes compute them in turn.

    Processes that train a client together compute the same items, since each has a part of the model.

    Args:
        work: function to tensors on the CPU and plain values.
        items: about equally large, or ordered by size; each process goes through all of them, as of a loader.

    Examples:
        >>> for_each(len, ["a", "bc"])
        [1, 2]
    """
    team = current_team()
    results, number = [], 0
    for item in items:  # counted on the way: a loader may not know its length
        if is_own_turn(number):
            results.append(work(item))
        number += 1
    parts = team.gather(results if team.leads else [], "for_each")[:: team.per_client]
    return [parts[place % team.seats][place // team.seats] for place in range(number)]


def is_own_turn(number: int) -> bool:
    """Return whether the piece of work with this number, from 0, is this process's; the processes take turns."""
    team = current_team()
    return number % team.seats == team.seat


def once(work: Callable[[], R], forward: bool = False) -> R:
    """Return ``work()`` of the team's first process; the others wait for it.

    Args:
        work: function to tensors on the CPU and plain values, such as one that reads a file which it may also write.
        forward: whether the work runs the model that is trained; all processes with a part of it then do the work.

    Examples:
        >>> once(lambda: 3)
        3
    """
    team = current_team()
    works = team.rank == 0 or (forward and team.seat == 0)
    return team.broadcast(work() if works else None, "once")


def merged(entries: Mapping[str, R]) -> dict[str, R]:
    """Return the entries that any of the team's processes has; for a name in several, that of the last process.

    Examples:
        >>> merged({"a": 1})
        {'a': 1}
    """
    everything: dict[str, R] = {}
    for part in current_team().gather(dict(entries), "merged"):
        everything |= part
    return everything


def is_first() -> bool:
    """Return whether this process is the team's first one, which alone writes files."""
    return current_team().rank == 0
