"""A device of these tests transfers a megabyte and computes 10^12 operations in a second, and draws 2 watts."""

import random
from math import inf

import pytest

from fedlight.devices.availability import HOUR, Always, Chance, Trace
from fedlight.devices.clock import IDLE_SECONDS, Job, Outcome, end_of, outcome_of, run_round
from fedlight.devices.device import Device

MB, TERA = 10**6, 10**12


def device(availability=None):
    speeds = {"tflops": 1, "utilisation": 1, "download_mbps": 8, "upload_mbps": 8}
    return Device("unit", memory_gib=1, watts=2, **speeds, availability=availability or Always())


def job(name, down, compute, up, leaves=None, fits=True, absent=False):
    """A job whose three parts take so many seconds, on a device that leaves after so many."""
    availability = Chance(0) if absent else None
    if leaves is not None:
        availability = Trace(((0, leaves / HOUR),))
    return Job(name, device(availability), compute * TERA, down * MB, up * MB, fits)


def play(jobs, wanted=10, deadline=None, now=0.0):
    outcomes, seconds = run_round(now, jobs, wanted, deadline, draw=(0, 0))
    assert [outcome.client_id for outcome in outcomes] == [job.client_id for job in jobs]
    return {outcome.client_id: outcome for outcome in outcomes}, seconds


def spent(outcome):
    return (outcome.download_seconds, outcome.compute_seconds, outcome.upload_seconds)


def test_the_round_ends_with_the_last_that_is_wanted():
    outcomes, seconds = play([job("slow", 1, 9, 1), job("fast", 1, 2, 1), job("mid", 1, 4, 1)], wanted=2)
    assert seconds == 6
    assert {name: o.reason for name, o in outcomes.items()} == {"slow": "surplus", "fast": "", "mid": ""}
    assert spent(outcomes["slow"]) == (1, 5, 0)  # told to stop after six seconds
    assert outcomes["slow"].flops == pytest.approx(5 * TERA)
    assert (outcomes["slow"].bytes_down, outcomes["slow"].bytes_up, outcomes["slow"].joules) == (MB, 0, 12)


def test_the_end_of_a_client_that_nobody_stops():
    """As in a round without a deadline that wants everybody, from any moment on."""
    jobs = {
        "": job("a", 1, 5, 2),
        "left": job("b", 1, 5, 2, leaves=7),
        "absent": job("c", 1, 5, 2, absent=True),
    }
    jobs["out_of_memory"] = job("d", 1, 5, 2, fits=False)
    ends = {"": 8.0, "left": 7.0, "absent": 0.0, "out_of_memory": 0.0}
    for reason, one in jobs.items():
        assert end_of(one, 0.0, draw=(0, 0)) == (ends[reason], reason)
        outcomes, _ = play([one])
        spent = inf if not reason else ends[reason]
        assert outcome_of(one, reason, spent) == outcomes[one.client_id]
    assert end_of(jobs[""], 100.0, draw=(0, 0)) == (108.0, "")
    assert end_of(job("b", 1, 5, 2, leaves=8), 0.0, draw=(0, 0)) == (8.0, "")  # through as it leaves
    assert end_of(jobs["left"], 3.0, draw=(0, 0)) == (7.0, "left")
    assert end_of(jobs["left"], 7.0, draw=(0, 0)) == (7.0, "absent")


def test_the_deadline():
    jobs = [job("a", 1, 2, 1), job("b", 1, 4, 4), job("c", 10, 1, 1), job("d", 2, 3, 2)]
    outcomes, seconds = play(jobs, deadline=7.0)
    assert seconds == 7
    assert {name: o.reason for name, o in outcomes.items()} == {"a": "", "b": "late", "c": "late", "d": ""}
    assert (spent(outcomes["b"]), outcomes["b"].bytes_up) == ((1, 4, 2), 2 * MB)  # half of its four megabytes
    assert (spent(outcomes["c"]), outcomes["c"].bytes_down) == ((7, 0, 0), 7 * MB)
    assert (outcomes["c"].flops, outcomes["c"].joules) == (0, 14)
    _, seconds = play(jobs[:1], deadline=7.0)
    assert seconds == 4  # nobody is late: no need to wait


def test_the_stretch_counts_from_now():
    late_evening = job("a", 1, 2, 1, leaves=100)
    assert play([late_evening], now=96.0)[0]["a"].reason == ""
    assert play([late_evening], now=97.0)[0]["a"] == Outcome("a", "left", 1, 2, 0, MB, 0, 2 * TERA, 6)
    assert play([late_evening], now=100.0)[0]["a"] == Outcome("a", "absent")


def test_absent_and_out_of_memory_spend_nothing():
    jobs = [job("a", 1, 2, 1), job("absent", 1, 1, 1, absent=True), job("small", 1, 1, 1, fits=False)]
    jobs.append(job("both", 1, 1, 1, absent=True, fits=False))
    outcomes, seconds = play(jobs, wanted=1)
    assert seconds == 4
    assert outcomes["absent"] == Outcome("absent", "absent")
    assert outcomes["small"] == Outcome("small", "out_of_memory")
    assert outcomes["both"] == Outcome("both", "absent")
    assert play(jobs[1:3])[1] == play([])[1] == IDLE_SECONDS == 600  # nobody is at work
    assert play(jobs[1:3], deadline=42.0)[1] == 42


def test_whoever_takes_part_has_sent_every_byte():
    """Speeds at which no time is a round number lose no byte to rounding."""
    draw = random.Random(0)
    for _ in range(2000):
        speeds = {
            "tflops": draw.random(),
            "download_mbps": draw.random() * 90,
            "upload_mbps": draw.random() * 9,
        }
        phone = Device("phone", memory_gib=1, watts=1, **speeds)
        one = Job("a", phone, draw.random() * TERA, draw.randrange(10**9), draw.randrange(10**9))
        outcomes, seconds = run_round(draw.random() * 1e7, [one], 1, None, (0, 0))
        assert (outcomes[0].bytes_down, outcomes[0].bytes_up) == (one.bytes_down, one.bytes_up)
        assert outcomes[0].flops == one.flops
        assert seconds == one.seconds == outcomes[0].joules


def by_events(jobs, leaves, wanted, deadline):
    """Reasons and the length of a round, event by event; times are whole seconds."""
    needs = {job.client_id: round(job.seconds) for job in jobs}
    working, reasons, now = {name for name in needs if leaves[name] > 0}, {}, 0
    reasons = dict.fromkeys(needs.keys() - working, "absent")
    if not working:
        return reasons, IDLE_SECONDS if deadline is None else deadline
    while working:
        done = sorted(name for name in working if needs[name] == now)
        for name in done:
            enough = sum(reason == "" for reason in reasons.values()) == wanted
            reasons[name] = "surplus" if enough else ""
        working -= set(done)
        gone = {name for name in working if leaves[name] == now}
        reasons |= dict.fromkeys(gone, "left")
        working -= gone
        if sum(reason == "" for reason in reasons.values()) == wanted:
            return reasons | dict.fromkeys(working, "surplus"), now
        if now == deadline:
            return reasons | dict.fromkeys(working, "late"), now
        now += bool(working)
    return reasons, now


def test_equals_a_queue_of_events():
    draw, seen = random.Random(1), set()
    for _ in range(2000):
        leaves = {f"c{i}": draw.choice([0, 3, 7, 12, inf]) for i in range(draw.randint(1, 6))}
        jobs = []
        for name, end in leaves.items():
            parts = [draw.randint(0, 5) for _ in range(3)]
            limits = {"absent": True} if end == 0 else {"leaves": None if end == inf else end}
            jobs.append(job(name, *parts, **limits))
        draw.shuffle(jobs)  # of those that are through at once, the lower client id is first
        wanted, deadline = draw.randint(1, 6), draw.choice([None, 4, 9, 20])
        outcomes, seconds = play(jobs, wanted, deadline)
        reasons, expected = by_events(jobs, leaves, wanted, deadline)
        assert {name: outcome.reason for name, outcome in outcomes.items()} == reasons
        assert seconds == expected
        for one in jobs:
            outcome, worked = outcomes[one.client_id], sum(spent(outcomes[one.client_id]))
            limit = 0 if outcome.reason == "absent" else min(one.seconds, seconds, leaves[one.client_id])
            assert worked == limit
            assert outcome.joules == 2 * worked
        seen |= set(reasons.values())
    assert seen == {"", "absent", "left", "late", "surplus"}
