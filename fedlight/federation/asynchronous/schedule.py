"""Schedule of buffered rounds: whom the server asks when, and whose updates make up which server step.

On the virtual clock it is a function of costs, seed and settings alone: it follows from how long each client takes, and
nothing is trained for it. On the real clock of a deployment, ``wait`` waits for what arrives. The rules, which also order
the events of one moment:

1. Clients that are through or drop out are taken in the order of their times, of equal times in the order of their ids.
2. With ``buffer_size`` arrivals the server steps, and the round is over. A client that is through at the same moment and
   comes behind counts for the next round.
3. When no other client is through at that moment, the server asks as many clients as may train beside those at work, once
   for each moment, drawn uniformly from those who are not at work and have neither arrived nor dropped out in this round.
   They receive the newest model.
4. If then no client is at work, a server with ``idle_seconds`` of 0 asks others until one is at work or all were asked. Then
   the round is over: the server steps with the updates that have arrived; without any it waits ``idle_seconds``, and the
   model stays as it is.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fedlight.federation.client import uniform_cohort


@dataclass(frozen=True)
class Assignment:
    """Work of a client, from the moment when the server asks it.

    Attributes:
        client_id: the client; it has one assignment at a time.
        asked: round that asked it, whose model it trains.
        start_seconds: time when it was asked.
        end_seconds: time when its update arrives or it drops out; one that declines does so at once. On a real clock it is
            infinite until then.
        reason: why it drops out; empty for one whose update arrives.
    """

    client_id: str
    asked: int
    start_seconds: float
    end_seconds: float
    reason: str = ""


@dataclass(frozen=True)
class ServerStep:
    """Round of a buffered federation: what happens until a server step.

    Attributes:
        round_idx: the round, from 0; it makes model ``round_idx + 1`` out of model ``round_idx``.
        start_seconds: time of the server step before.
        end_seconds: time of the server step.
        arrivals: assignments whose updates are in the buffer, in the order of their arrival.
        dropouts: assignments that ended in this round without an update, in the order of their ends.
        at_work: assignments that go on behind the server step, by their ends.
    """

    round_idx: int
    start_seconds: float
    end_seconds: float
    arrivals: tuple[Assignment, ...]
    dropouts: tuple[Assignment, ...]
    at_work: tuple[Assignment, ...]

    def staleness(self, assignment: Assignment) -> int:
        """Return the number of server steps between the model that a client received and the one that it changes."""
        return self.round_idx - assignment.asked

    @property
    def versions(self) -> set[int]:
        """Rounds whose models are trained by clients at work whose updates will arrive."""
        return {assignment.asked for assignment in self.at_work if not assignment.reason}


Ask = Callable[[list[str], float], Iterable[Assignment]]
"""Function from the ids of the clients that are asked, and the time, to their assignments."""
Wait = Callable[[list[Assignment]], tuple[float, list[Assignment]]]
"""Function from the assignments at work, by their ends, to the time of the next end, and to what they are then."""


def until_next_end(busy: list[Assignment]) -> tuple[float, list[Assignment]]:
    """Return the time of the next end on the virtual clock, where all ends are known beforehand."""
    return busy[0].end_seconds, busy


def next_step(
    round_idx: int,
    now_seconds: float,
    at_work: Iterable[Assignment],
    clients: Sequence[str],
    ask: Ask,
    buffer_size: int,
    concurrency: int,
    seed: int,
    idle_seconds: float = 600.0,
    wait: Wait = until_next_end,
) -> ServerStep:
    """Return the next server step; the first draw of a round is that of a synchronous cohort.

    Args:
        round_idx: the round.
        now_seconds: time of the server step before, 0 at first.
        at_work: assignments that went on behind that step.
        clients: ids of all clients, in their order.
        ask: function that asks clients; one whose assignment it leaves out has nothing to do in this round.
        buffer_size: updates of a server step, at least 1.
        concurrency: most clients at work at a time, at least 1.
        seed: seed of the sampling.
        idle_seconds: wait of the server when no client is at work and nothing has arrived; 0: it asks all others before.
        wait: function that waits until a client is through or drops out.

    Examples:
        >>> def ask(names, now):
        ...     return [Assignment(name, 0, now, now + {"a": 2.0, "b": 3.0}[name]) for name in names]
        >>> step = next_step(0, 0.0, (), ["a", "b"], ask, buffer_size=1, concurrency=2, seed=0)
        >>> [one.client_id for one in step.arrivals], step.end_seconds, [one.client_id for one in step.at_work]
        (['a'], 2.0, ['b'])
    """
    now, busy = now_seconds, sorted(at_work, key=_by_end)
    arrivals: list[Assignment] = []
    dropouts: list[Assignment] = []
    draws = 0
    while True:
        while busy and busy[0].end_seconds <= now:  # rule 1
            ended = busy.pop(0)
            (dropouts if ended.reason else arrivals).append(ended)
            if len(arrivals) == buffer_size:  # rule 2
                return ServerStep(round_idx, now_seconds, now, tuple(arrivals), tuple(dropouts), tuple(busy))
        taken = {assignment.client_id for assignment in (*busy, *arrivals, *dropouts)}
        idle = [name for name in clients if name not in taken]
        if number := min(concurrency - len(busy), len(idle)):  # rule 3
            asked = [*ask(uniform_cohort(idle, number, seed, round_idx, draws), now)]
            draws += 1
            declined = [each for each in asked if each.reason and each.end_seconds <= now]
            dropouts += declined
            busy = sorted([*busy, *(each for each in asked if each not in declined)], key=_by_end)
            if declined and not busy and not idle_seconds:  # rule 4
                continue
        if not busy:
            end = now if arrivals else now + idle_seconds
            return ServerStep(round_idx, now_seconds, end, tuple(arrivals), tuple(dropouts), ())
        end, busy = wait(busy)
        now, busy = max(now, end), sorted(busy, key=_by_end)


def _by_end(assignment: Assignment) -> tuple[float, str]:
    return assignment.end_seconds, assignment.client_id
