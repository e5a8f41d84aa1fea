import pytest

from fedlight.report.visits import OUTCOMES, PARTS, peaks, visits_of

FIELDS = "round,client,device,reason,bytes_up,peak_bytes,budget_bytes,round_end_seconds".split(",")  # noqa: SIM905


def table(*lines):
    return [dict(zip(FIELDS, line.split(","), strict=True)) for line in lines]


ROWS = table(
    "0,a,phone,,10,7,9,5.0",
    "0,a,phone,,20,8,9,5.0",  # the same client, a second visit
    "0,b,tablet,late,0,30,20,5.0",
    "2,b,tablet,,40,6,20,9.5",
    "2,c,phone,absent,0,1,9,9.5",
    "2,e,phone,clipped+large_share,5,1,9,9.5",
    "2,f,phone,dropped: its node has failed,0,1,9,9.5",
    ",d,phone,,99,9,9,9.5",  # of no round
)


def test_a_client_with_two_visits_takes_part_once():
    visits = visits_of(ROWS)
    took_part, late, absent, dropped = map(OUTCOMES.index, ("", "late", "absent", "dropped"))
    counts = visits.participation()
    assert counts.shape == (len(OUTCOMES), 3)
    assert counts[took_part].tolist() == [1, 0, 2]
    assert counts[late].tolist() == [1, 0, 0]
    assert counts[absent].tolist() == counts[dropped].tolist() == [0, 0, 1]
    assert counts.sum() == 6
    assert visits.device_names == ["phone", "tablet"]


def test_sums_of_rounds_and_the_clock():
    visits = visits_of(ROWS)
    assert visits.per_round("bytes_up").tolist() == [30, 0, 45]
    assert visits.round_ends().tolist() == [5, 5, 9.5]  # the second round left no row
    assert visits.per_round("joules").tolist() == [0, 0, 0]


def test_groupings_send_bytes_too():
    grouping = [{"epoch": epoch, "fed/grouping_bytes_up": "3"} for epoch in ("0", "1", "7", "")]
    assert visits_of(ROWS, grouping).per_round("bytes_up").tolist() == [33, 3, 45]


def test_the_largest_visit_of_each_device():
    phone, tablet = peaks(visits_of(ROWS))
    assert (phone["device"], phone["budget_bytes"]) == ("phone", 9)
    assert (tablet["device"], tablet["budget_bytes"]) == ("tablet", 20)
    others = {"activation_bytes": "2", "weight_bits": "4"}
    rows = [{**row, "base_bytes": row["peak_bytes"], **others} for row in ROWS]
    parts = [[peak[f"{part}_bytes"] for part in PARTS] for peak in peaks(visits_of(rows))]
    assert parts == [[8, 0, 0, 0, 2], [30, 0, 0, 0, 2]]


@pytest.mark.parametrize("rows", [[], table(",a,phone,,1,1,1,1"), [{"round": "x"}]])
def test_without_a_whole_row_there_are_no_visits(rows):
    assert visits_of(rows) is None
