import random

import pytest

from fedlight.federation.asynchronous import Assignment, FedBuff, next_step
from fedlight.federation.client import Visit, uniform_cohort


def play(rounds, takes, buffer_size, concurrency, seed=0, clients=None, **kwargs):
    """Server steps of a run; ``takes``: seconds and reason of each client, or a function of client, round and time."""
    steps, now, at_work = [], 0.0, ()
    for idx in range(rounds):

        def ask(names, at, idx=idx):
            found = []
            for name in names:
                seconds, reason = takes(name, idx, at) if callable(takes) else takes[name]
                found.append(Assignment(name, idx, at, at + seconds, reason))
            return found

        names = clients or sorted(takes)
        step = next_step(idx, now, at_work, names, ask, buffer_size, concurrency, seed, **kwargs)
        now, at_work = step.end_seconds, step.at_work
        steps.append(step)
    return steps


def trace(steps):
    """Of each step its end, and client, round in which it was asked, staleness and time of each arrival."""
    return [
        (step.end_seconds, [(a.client_id, a.asked, step.staleness(a), a.end_seconds) for a in step.arrivals])
        for step in steps
    ]


def test_a_trace_written_by_hand():
    """a takes 2 seconds, b 3, c 7; the server steps with two updates, and all three may be at work.

    ======  =========================================  =====================================
    moment  what happens                                asked then, until
    ======  =========================================  =====================================
    0                                                   a 2, b 3, c 7
    2       a waits
    3       b: step 1                                   a 5, b 6
    5       a waits
    6       b: step 2                                   a 8, b 9
    7       c of model 0 waits
    8       a: step 3 with c, two steps old             a 10, c 15
    9       b of model 2 waits
    10      a: step 4 with b, one step old              a 12, b 13
    12      a waits
    13      b: step 5                                   a 15, b 16
    15      a, then c of model 3: step 6
    ======  =========================================  =====================================
    """
    takes = {"a": (2.0, ""), "b": (3.0, ""), "c": (7.0, "")}
    steps = play(6, takes, buffer_size=2, concurrency=3)
    assert trace(steps) == [
        (3.0, [("a", 0, 0, 2.0), ("b", 0, 0, 3.0)]),
        (6.0, [("a", 1, 0, 5.0), ("b", 1, 0, 6.0)]),
        (8.0, [("c", 0, 2, 7.0), ("a", 2, 0, 8.0)]),
        (10.0, [("b", 2, 1, 9.0), ("a", 3, 0, 10.0)]),
        (13.0, [("a", 4, 0, 12.0), ("b", 4, 0, 13.0)]),
        (15.0, [("a", 5, 0, 15.0), ("c", 3, 2, 15.0)]),
    ]
    assert [step.start_seconds for step in steps] == [0.0, 3.0, 6.0, 8.0, 10.0, 13.0]
    assert [step.versions for step in steps] == [{0}, {0}, {2}, {3}, {3}, {5}]


def test_a_server_that_does_not_wait_asks_on_until_somebody_is_there():
    takes = dict.fromkeys("abcdefg", (0.0, "absent")) | {"h": (2.0, "")}
    for step in play(4, takes, buffer_size=1, concurrency=2, idle_seconds=0.0):
        assert [one.client_id for one in step.arrivals] == ["h"]
    del takes["h"]
    (step,) = play(1, takes, buffer_size=1, concurrency=2, idle_seconds=0.0)
    assert (step.end_seconds, step.arrivals, len(step.dropouts)) == (0.0, (), 7)
    (step,) = play(1, {"h": (0.0, "")}, buffer_size=1, concurrency=1)
    assert (len(step.arrivals), step.dropouts) == (1, ())  # to take no time is not to fail
    step = next_step(0, 0.0, (), ["a", "b"], lambda *_: [], 1, 1, seed=0, idle_seconds=0.0)  # without work
    assert (step.arrivals, step.dropouts) == ((), ())


class Ticking:
    """The same rules by a clock that ticks once a second and looks at every client; times are whole seconds."""

    def __init__(self, clients, takes, buffer_size, concurrency, seed):
        self.clients, self.takes = clients, takes
        self.buffer_size, self.concurrency, self.seed = buffer_size, concurrency, seed
        self.work, self.now = {}, 0

    def step(self, idx):
        arrived, dropped, draws, start = [], [], 0, self.now
        while True:
            for name in sorted(self.work):
                asked, _, end, reason = self.work[name]
                if end == self.now:
                    del self.work[name]
                    (dropped if reason else arrived).append(name)
                    if not reason:
                        self.used.append((idx, name, asked, self.now))
                    if len(arrived) == self.buffer_size:
                        return start, self.now, dropped
            idle = [c for c in self.clients if c not in self.work and c not in arrived and c not in dropped]
            room = min(self.concurrency - len(self.work), len(idle))
            # The server looks at a moment at which something has happened, and at the beginning of a round.
            if room and (self.now == start or self.event):
                for name in uniform_cohort(idle, room, self.seed, idx, draws):
                    seconds, reason = self.takes(name, idx, self.now)
                    if reason and not seconds:
                        dropped.append(name)
                    else:
                        self.work[name] = (idx, self.now, self.now + seconds, reason)
                draws += 1
            if not self.work:
                self.now += 0 if arrived else 600
                return start, self.now, dropped
            self.now += 1
            self.event = any(end == self.now for _, _, end, _ in self.work.values())

    def play(self, rounds):
        self.used, self.event = [], True
        return [self.step(idx) for idx in range(rounds)]


@pytest.mark.parametrize("seed", range(60))
def test_random_schedules_are_those_of_a_ticking_clock(seed):
    draw = random.Random(seed)
    clients = [f"c{i}" for i in range(draw.randint(1, 8))]
    buffer_size, concurrency = draw.randint(1, 4), draw.randint(1, len(clients))
    reasons = ["", "", "", "left", "absent"] if draw.random() < 0.6 else [""]

    def takes(name, idx, at):
        own = random.Random(f"{seed} {name} {idx} {at:.0f}")
        reason = own.choice(reasons)
        return (0 if reason == "absent" else own.randint(1, 9)), reason

    steps = play(12, takes, buffer_size, concurrency, seed, clients)
    ticking = Ticking(clients, takes, buffer_size, concurrency, seed)
    assert [(s.start_seconds, s.end_seconds, [d.client_id for d in s.dropouts]) for s in steps] == [
        (start, end, dropped) for start, end, dropped in ticking.play(12)
    ]
    used = [(s.round_idx, a.client_id, a.asked, a.end_seconds) for s in steps for a in s.arrivals]
    assert used == ticking.used
    for step in steps:
        there = [one.client_id for one in (*step.arrivals, *step.dropouts, *step.at_work)]
        assert len(there) == len({*there})  # a client has one outcome in a round
        assert len(step.at_work) <= concurrency
        assert len(step.versions) <= concurrency


def test_weights_of_stale_updates():
    polynomial = FedBuff(a=1.0)
    assert [polynomial.weight(x) for x in (0, 1, 3)] == [1.0, 0.5, 0.25]
    assert FedBuff().weight(8) == pytest.approx(1 / 3)  # the paper's 1 / sqrt(1 + x)
    hinge = FedBuff(staleness="hinge", a=10.0, b=4)
    assert [hinge.weight(x) for x in (0, 4, 5, 6)] == [1.0, 1.0, 1 / 11, 1 / 21]
    assert [FedBuff(staleness="constant").weight(x) for x in (0, 100)] == [1.0, 1.0]
    assert FedBuff(a=0.0).weight(7) == 1.0
    assert (Visit("a", 2).asked_in(5), Visit("a", 2, asked=3).asked_in(5)) == (5, 3)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"buffer_size": 0}, "buffer_size=0 must be at least 1"),
        ({"concurrency": 0}, "concurrency=0 must be at least 1"),
        ({"b": -1}, "b=-1 must be at least 0"),
        ({"a": -0.5}, r"a=-0.5 must be at least 0; 0 weighs all updates alike"),
        ({"staleness": "linear"}, "staleness='linear' is not one of polynomial, hinge, constant"),
    ],
)
def test_settings_out_of_range_are_refused(settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        FedBuff(**settings)
