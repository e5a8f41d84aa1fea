from pathlib import Path

import pytest
from charted import charts
from tiny_world import write_lines

from fedlight.report.parts import Table
from fedlight.report.sections import client_data, devices, groups
from fedlight.report.sections.client_data import bubbles, by_name
from fedlight.runs.facts import Distribution
from fedlight.runs.run import Run, read_runs

VISITS = "round,client,split,examples,bytes_down,bytes_up"


def tables(section):
    return {part.title: part for part in section.parts if isinstance(part, Table)}


@pytest.mark.parametrize("module", [client_data, devices, groups])
def test_nothing_to_say(module, tmp_path):
    write_lines(tmp_path / "run/config.yaml", "seed_everything: 0")
    assert module.section(read_runs([tmp_path / "run"])) is None


def test_counts_of_clients_and_labels(tmp_path):
    rows = ("a,tea,train,5", "a,jam,train,1", "b,jam,train,2", "a,tea,val,9", "b,ja")
    write_lines(tmp_path / "run/data.csv", "client,label,split,rows", *rows)
    write_lines(tmp_path / "run/visits.csv", VISITS, "0,a,train,6,1,1")
    found = client_data.section(read_runs([tmp_path / "run"]))
    assert charts(found)["client_data_0"].rows == [
        {"client": "a", "label": "tea", "rows": 5},
        {"client": "a", "label": "jam", "rows": 1},
        {"client": "b", "label": "jam", "rows": 2},
    ]
    sizes = tables(found)["Sizes of clients"]
    line = dict(zip(sizes.header, sizes.lines[0], strict=True))
    expected = {"clients": "2", "rows": "8", "median": "4", "labels": "2", "labels a client": "1.5"}
    assert expected.items() <= line.items()
    assert line["top label"] == "92%"  # the mean of 5/6 and 1
    assert found.intro.endswith("is two.")  # all are drawn


def test_without_a_table_of_data_visits_and_known_groups_are_taken(tmp_path):
    write_lines(tmp_path / "run/visits.csv", VISITS, "0,a,train,6,1,1", "0,b,train,4,1,1", "1,a,train,6,1,1")
    write_lines(tmp_path / "run/groups.csv", "round,client,selector,known_group", "0,a,0,x", "0,b,1,y")
    found = client_data.section(read_runs([tmp_path / "run"]))
    assert charts(found)["client_data_0"].rows == [
        {"client": "a", "label": "x", "rows": 6},
        {"client": "b", "label": "y", "rows": 4},
    ]
    assert "group that it is known to belong to" in charts(found)["client_data_0"].caption


def test_visits_of_a_part_are_on_the_client_s_own_rows_and_those_on_candidates_are_not(tmp_path):
    lines = ("0,a,adapter0,6,1,1", "0,a,adapter1,6,1,1", "0,b,head,4,1,1", "0,b,synthetic,9,1,1")
    write_lines(tmp_path / "run/visits.csv", VISITS, *lines)
    found = client_data.section(read_runs([tmp_path / "run"]))
    (line,) = tables(found)["Sizes of clients"].lines
    assert line[1:4] == ["2", "10", "4"]  # clients, rows, the smallest


def test_runs_with_equal_data_share_a_line_and_seeds_are_told_apart(tmp_path):
    for seed, sizes in ((0, "642"), (1, "732")):
        for method, seen in (("one", 3), ("two", 3), ("three", 2)):  # the third never saw the last client
            both = [*zip("abc", sizes, strict=True)][:seen]
            lines = [f"0,{client},train,{size},1,1" for client, size in both]
            write_lines(tmp_path / f"r/seed{seed}/{method}/visits.csv", VISITS, *lines)
    found = client_data.section(read_runs([tmp_path / "r"]))
    sizes = [line[:3] for line in tables(found)["Sizes of clients"].lines]
    assert sizes == [[f"one and 2 more, seed {seed}", "3", "12"] for seed in (0, 1)]
    assert found.intro.endswith("In the table alone: 1 more, of other seeds or methods.")


def test_data_of_one_name_are_all_there():
    counts = [{"a": {"": size}, "b": {"": size}} for size in range(3)]
    runs = [Run(Path(f"seed{seed}/m"), "m", "", Path()) for seed in range(6)]
    data = [Distribution(c, "data.csv", False, runs[2 * n : 2 * n + 2]) for n, c in enumerate(counts)]
    assert [*by_name(data, 6).items()] == [*zip(("m", "m (2)", "m (3)"), data, strict=True)]


def test_many_clients_and_labels_the_largest_are_drawn_and_the_rest_is_their_mean():
    counts = {f"c{index:03d}": {f"l{index % 30}": index + 1} for index in range(100)}
    table = bubbles(counts, clients=40, labels=16)
    assert table.rows.shape == (17, 41)
    assert (table.other_clients, table.other_labels) == (60, 14)
    assert set(table.clients[:-1]) == {f"c{index:03d}" for index in range(60, 100)}
    assert table.rows[:, :-1].sum() == sum(range(61, 101))
    assert table.rows[:, -1].sum() == pytest.approx(sum(range(1, 61)) / 60)


FLEET = (
    "round,client,split,steps,examples,bytes_down,bytes_up,device,reason,weight_bits,base_bytes,adapter_bytes,gradient_bytes,"
    "moment_bytes,activation_bytes,peak_bytes,budget_bytes,download_seconds,compute_seconds,upload_seconds,joules,"
    "round_end_seconds"
)


def fleet_run(folder, up=1000):
    parts = "16,100,10,10,20,60,200,300,1,2,3"
    write_lines(
        folder / "visits.csv",
        *(
            FLEET,
            f"0,a,train,1,5,1000,{up},phone,,{parts},2000,50",
            f"0,b,train,0,5,0,0,tab,absent,{parts},0,50",
        ),
        *(f"1,a,train,1,5,1000,{up},phone,,{parts},4000,80", f"1,b,train,1,5,1000,{up},tab,,{parts},1000,80"),
    )


def test_devices_over_two_seeds(tmp_path):
    fleet_run(tmp_path / "r/seed0/m")
    fleet_run(tmp_path / "r/seed1/m", up=3000)
    found = devices.section(read_runs([tmp_path / "r"]))
    drawn = charts(found)
    assert set(drawn) == {"participation_by_round", "memory", "bytes_down", "bytes_up", "time", "energy"}
    participation = drawn["participation_by_round"].rows
    assert [(row["took part"], row["absent"]) for row in participation] == [(1, 1), (2, 0)]
    assert drawn["bytes_up"].rows == [  # the mean of both seeds, in megabytes
        {"run": "m", "rounds_done": 1, "in_a_round": 0.002, "so_far": 0.002},
        {"run": "m", "rounds_done": 2, "in_a_round": 0.004, "so_far": 0.006},
    ]
    assert [row["so_far"] for row in drawn["energy"].rows] == [2.0, 7.0]
    assert [row["in_a_round"] for row in drawn["time"].rows] == pytest.approx([50 / 60, 30 / 60])
    memory = drawn["memory"].rows[0]
    assert (memory["device"], memory["activation_bytes"], memory["budget_bytes"]) == ("phone", 60, 300)
    axes = drawn["memory"].figure.axes[0]
    longest = max(bar.get_x() + bar.get_width() for bar in axes.patches)
    assert longest / axes.lines[0].get_xdata()[0] == pytest.approx(200 / 300)
    assert axes.get_xlabel() == "KiB at the peak; mark: the device's budget"
    took = tables(found)["What runs took"]
    line = dict(zip(took.header, took.lines[0], strict=True))
    assert {"took part": "3", "MB up": "0.006", "kJ": "7", "dropped out": "25%"}.items() <= line.items()
    of_devices = tables(found)["Devices of m"]
    phone, tab = (line[:5] for line in of_devices.lines)
    assert (phone, tab) == (["phone", "1", "2", "2", "0"], ["tab", "1", "2", "1", "1"])
    assert of_devices.header[4] == "absent"


def test_costs_of_runs_that_are_not_drawn_are_in_the_data(tmp_path):
    for number in range(19):
        fleet_run(tmp_path / f"r/seed0/m{number:02}", up=number)
    found = devices.section(read_runs([tmp_path / "r"]))
    chart = charts(found)["bytes_up"]
    assert "1 more runs are in the data alone" in chart.caption
    assert len({row["run"] for row in chart.rows}) == 19
    assert found.notes == ("Tables of devices are those of 4 of 19 methods.",)


def test_without_a_fleet_there_is_the_wire_and_a_damaged_fleet_has_no_table(tmp_path):
    rows = ("0,a,train,6,2000000,1000000", "1,b,train,6,2000000,1000000")
    write_lines(tmp_path / "run/visits.csv", VISITS, *rows)
    found = devices.section(read_runs([tmp_path / "run"]))
    assert set(charts(found)) == {"bytes_down", "bytes_up"}
    assert [row["so_far"] for row in charts(found)["bytes_down"].rows] == [2.0, 4.0]
    fleet_run(tmp_path / "bad")
    text = (tmp_path / "bad/visits.csv").read_text().replace(",4000,", ",much,")
    (tmp_path / "bad/visits.csv").write_text(text)
    damaged = devices.section(read_runs([tmp_path / "bad"]))
    assert "could not convert" in damaged.notes[0]
    assert [row["so_far"] for row in charts(damaged)["energy"].rows] == [2.0, 3.0]


def test_a_run_with_a_damaged_round_is_named_and_the_others_are_shown(tmp_path):
    for name in ("good", "bad"):
        write_lines(tmp_path / f"{name}/config.yaml", "seed_everything: 0")
    write_lines(tmp_path / "good/visits.csv", VISITS, "0,a,train,6,1,1")
    write_lines(tmp_path / "bad/visits.csv", VISITS, "0,a,train,6,1,1", "1000000000000,a,train,6,1,1")
    both = devices.section(read_runs([tmp_path / "good", tmp_path / "bad"]))
    alone = devices.section(read_runs([tmp_path / "bad"]))
    why = "left out: visits.csv names round 1000000000000, and no run has that many: the file is damaged"
    assert [note.partition(": ")[2] for note in (*both.notes, *alone.notes)] == [why, why]
    assert "bad" in both.notes[0]
    assert both.parts
    assert not alone.parts


def test_groups_that_move_towards_the_known_ones(tmp_path):
    at = {0: "0001", 3: "0011"}
    known = "xxyy"
    lines = [f"{done},{c},{at[done][i]},{known[i]}" for done in at for i, c in enumerate("abcd")]
    write_lines(tmp_path / "run/groups.csv", "round,client,selector,known_group", *lines, "6,a,", "6,b,?,x")
    write_lines(tmp_path / "run/visits.csv", VISITS)
    found = groups.section(read_runs([tmp_path / "run"]))
    drawn = charts(found)
    quarter = dict.fromkeys(("mean", "low", "high"), 0.25)
    assert drawn["fed_groups_moved"].rows == [{"run": "run", "round": 3, **quarter, "seeds": 1}]
    assert drawn["fed_group_ari"].rows[-1]["mean"] == 1.0
    assert len(drawn["groups_run"].rows) == 8
    assert tables(found)["The last grouping"].lines == [["run", "4", "2", "2 / 2", "0.25", "1.00"]]
