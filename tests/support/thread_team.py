"""Team of threads in the place of processes: one runs at a time, and another one while it waits for the others."""

import threading
from collections import defaultdict
from itertools import count

from fedlight.processes import team as teams

PATIENCE_SECONDS = 60


class OwnTeam:
    """Running team of each thread, in the place of the process's."""

    def __init__(self):
        self.of = threading.local()

    def __bool__(self):
        return hasattr(self.of, "team")

    def __getitem__(self, place):
        return self.of.team


class Meeting:
    """One exchange: a place for what each member brings, and where they wait for each other."""

    def __init__(self, size):
        self.slots, self.barrier = [b""] * size, threading.Barrier(size, timeout=PATIENCE_SECONDS)


def on_team(monkeypatch, size, body):
    """Return ``body(rank)`` of each member of a team; raise the first error of one of them."""
    baton, meetings = threading.Lock(), defaultdict(lambda: Meeting(size))
    results, errors, running = [None] * size, [], OwnTeam()

    def member(rank):
        numbers = count()

        def exchange(data):
            meeting = meetings[next(numbers)]
            meeting.slots[rank] = data
            baton.release()
            try:
                meeting.barrier.wait()
            finally:
                baton.acquire()
            return [*meeting.slots]

        running.of.team = teams.Team(rank, size, exchange)
        with baton:
            try:
                results[rank] = body(rank)
            except BaseException as error:
                errors.append(error)
                meetings[
                    next(numbers)
                ].barrier.abort()  # the one before is over for all, also for who is still leaving

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(size)]
    with monkeypatch.context() as patched:
        patched.setattr(teams, "_running", running)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    errors.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))
    if errors:
        raise errors[0]
    return results
