import re
from math import inf

import numpy as np
import pytest
from refusals import refusal

from fedlight.devices.availability import HOUR, Always, Chance, Trace, parse_availability
from fedlight.support.seeding import derive_seed

QUARTER = HOUR / 4


def hours(trace, hour, client="c"):
    """Until which hour the client stays that is asked at ``hour``; None if it is not there."""
    until = trace.available_until(hour * HOUR, 0, 0, client)
    return None if until is None else until / HOUR


def test_a_night_runs_past_midnight():
    night = Trace(((22, 30),), period_hours=24)
    assert [hours(night, hour) for hour in (21.75, 22, 23, 24, 29.75, 30)] == [None, 30, 30, 30, 30, None]
    assert [hours(night, hour) for hour in (0, 5.75, 6)] == [6, 6, None]
    assert hours(night, 10 * 24 + 23) == 10 * 24 + 30
    once = Trace(((1, 2), (5, 8)))  # without a period it ends
    until = {0: None, 1: 2, 1.5: 2, 2: None, 5: 8, 7.75: 8, 8: None, 1e6: None}
    assert {hour: hours(once, hour) for hour in until} == until


def test_nobody_leaves_where_two_intervals_touch():
    split = Trace(((0, 6), (12, 14), (14, 15), (22, 24)), period_hours=24)
    assert [hours(split, hour) for hour in (23, 3, 13, 14.5)] == [30, 6, 15, 15]
    whole = Trace(((0, 12), (12, 24)), period_hours=24)
    assert [hours(whole, hour) for hour in (0, 11, 23.5, 100)] == [inf] * 4
    assert hours(Trace(((3, 27),), period_hours=24), 2) == inf


@pytest.mark.slow
@pytest.mark.parametrize(("start", "period"), [(8.3, 24), (8.05, 24), (0.15, 23.7)])
def test_nobody_leaves_in_a_whole_period_of_decimals(start, period):
    trace = Trace(((start, round(start + period, 2)),), period_hours=period)
    assert hours(trace, 0) == inf


def test_a_million_questions_equal_the_table():
    """The table has one entry for each quarter of an hour; what is asked lies anywhere in it, or on its lines."""
    draw = np.random.default_rng(0)
    asked, there = 0, 0
    for case in range(125):
        period = int(draw.integers(8, 200)) if case % 5 else None
        lines = np.sort(draw.choice(period or 200, size=2 * int(draw.integers(1, 4)), replace=False))
        if case % 2 and period:  # the last interval runs into the next period
            lines[-1] = period + draw.integers(0, lines[0] + 1)
        intervals = tuple((start / 4, end / 4) for start, end in lines.reshape(-1, 2).tolist())
        spread = 3.3 if case % 3 == 0 else 0.0
        trace = Trace(intervals, None if period is None else period / 4, spread)
        seed = case
        moved = spread * HOUR * derive_seed(seed, "spread", "c") / 2**32
        times = draw.uniform(0, 5 * (period or 60) * QUARTER, size=8000)
        if not spread:
            times[:2000] = np.floor(times[:2000] / QUARTER) * QUARTER
        expected = from_the_table(lines.tolist(), period, times - moved) + moved
        found = [trace.available_until(time, seed, 0, "c") for time in times.tolist()]
        found = np.array([-inf if until is None else until for until in found])
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-6)
        asked, there = asked + len(times), there + int((found > 0).sum())
    assert asked == 1_000_000
    assert 0.2 < there / asked < 0.8


def from_the_table(lines, period, times):
    """Ends of the stretches that ``times`` lie in, by looking at every quarter; minus infinity where absent."""
    ahead = 20 * (period or 0)  # periods before time zero, for clients that come later
    length = ahead + 12 * (period or 60)
    table = np.zeros(length, dtype=bool)
    for shift in range(-(period or 0), length, period or length):
        for start, end in zip(lines[::2], lines[1::2], strict=True):
            table[max(0, start + shift) : max(0, end + shift)] = True
    ends = np.arange(length + 1)
    for quarter in range(length - 1, -1, -1):
        ends[quarter] = ends[quarter + 1] if table[quarter] else quarter
    quarters = np.floor(times / QUARTER).astype(int) + ahead
    there = (quarters >= 0) & table[np.maximum(quarters, 0)]
    until = ends[np.maximum(quarters, 0)]
    return np.where(there, np.where(until == length, inf, (until - ahead) * QUARTER), -inf)


def test_clients_come_at_their_own_hours():
    trace = Trace(((0, 8),), period_hours=24, spread_hours=4)
    ends = np.array([hours(trace, 24 + 5, client=f"c{i}") for i in range(2000)])
    assert ends.min() >= 32
    assert ends.max() < 36
    assert abs(ends.mean() - 34) < 0.1
    assert hours(trace, 24 + 5, client="c7") == hours(trace, 24 + 5, client="c7") == ends[7]
    assert trace.available_until(29 * HOUR, 1, 0, "c7") != trace.available_until(29 * HOUR, 0, 0, "c7")
    assert trace.available_until(29 * HOUR, 0, 5, "c7") == trace.available_until(29 * HOUR, 0, 0, "c7")


def test_a_probability_is_drawn_for_each_round_and_client():
    there = [
        [Chance(0.3).available_until(7.0, 1, round_idx, f"c{i}") == inf for i in range(100)]
        for round_idx in range(100)
    ]
    share = np.array(there)
    assert abs(share.mean() - 0.3) < 0.02
    assert share.mean(axis=0).std() < 0.1  # nobody is always there
    assert share.mean(axis=1).std() < 0.1
    assert {Chance(1).available_until(0.0, 0, r, "c") for r in range(100)} == {inf}
    assert {Chance(0).available_until(0.0, 0, r, "c") for r in range(100)} == {None}


def test_yaml_forms():
    assert parse_availability("always") == Always()
    assert parse_availability(1) == Chance(1.0)
    weekly = {"intervals_hours": [[1, 2], [3, 4.5]], "period_hours": 168, "spread_hours": 2}
    assert parse_availability(weekly) == Trace(((1.0, 2.0), (3.0, 4.5)), 168.0, 2.0)


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("sometimes", "availability='sometimes' (it is none of these): give always, a probability, or"),
        (True, "availability=True (it is none of these): give always"),
        (1.5, "availability=1.5 is a probability"),
        (-0.1, "in [0, 1]"),
        ({"hours": [[1, 2]]}, "unexpected keyword argument 'hours'): give always"),
        ({"period_hours": 24}, "intervals_hours is empty"),
        ({"intervals_hours": [[1, 2, 3]]}, "intervals_hours=((1, 2, 3),) must be a tuple"),
        ({"intervals_hours": 5}, "or intervals_hours: [[start, end], ...]"),
        ({"intervals_hours": [["a", 2]]}, "intervals_hours=(('a', 2),) must be a tuple"),
        ({"intervals_hours": [[2, 2]]}, "[2, 2] must end after it starts"),
        ({"intervals_hours": [[22, 6]], "period_hours": 24}, "past midnight is [22, 30]"),
        ({"intervals_hours": [[1, float("inf")]]}, "must end after"),
        ({"intervals_hours": [[-1, 2]]}, "[-1, 2] starts before 0"),
        ({"intervals_hours": [[3, 5], [1, 2]]}, "[1, 2] starts before 5: give intervals in order"),
        ({"intervals_hours": [[1, 3], [2, 4]]}, "[2, 4] starts before 3"),
        ({"intervals_hours": [[24, 25]], "period_hours": 24}, "[24, 25] starts outside of period_hours=24"),
        ({"intervals_hours": [[3, 5], [22, 28]], "period_hours": 24}, "the last ends at 28, after the first"),
        ({"intervals_hours": [[0, 25]], "period_hours": 24}, "ends at 25"),
        ({"intervals_hours": [[1, 2]], "period_hours": 0}, "period_hours=0 must be above 0"),
        ({"intervals_hours": [[1, 2]], "spread_hours": -1}, "spread_hours=-1 must be at least 0"),
    ],
)
def test_what_cannot_be(value, complaint):
    with refusal(re.escape(complaint)):
        parse_availability(value)


def test_visits_of_a_day():
    assert Always().visits_per_day(HOUR) == 24
    assert Chance(0.25).visits_per_day(HOUR) == 6
    night = Trace(((12, 13), (22, 30)), period_hours=24)
    assert night.visits_per_day(HOUR) == 9
    assert night.visits_per_day(3 * HOUR) == 2  # two of three hours fit into eight, none into one
    assert night.visits_per_day(8 * HOUR + 1) == 0
    assert Trace(((0, 12), (12, 24)), period_hours=24).visits_per_day(7 * HOUR) == 24 / 7
    assert Trace(((0, 5), (29, 48)), period_hours=168).visits_per_day(HOUR) == pytest.approx(24 / 7)
    assert Trace(((0, 5), (29, 48))).visits_per_day(HOUR) == 12
