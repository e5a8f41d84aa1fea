import json

import pytest
from tiny_world import table

from fedlight.callbacks.attacks.records import AttackTable, remove_later
from fedlight.support.files import write_json_lines


def filled(file):
    one, other = AttackTable(file, "one"), AttackTable(file, "other")
    one.put(1, {"c1": {"exact": 0.5}, "global": {"exact": 0.25}})
    other.put(1, {"global": {"auc": 0.75}})
    other.put(2, {"global": {"auc": 0.875}})
    one.put(2, {"c0": {"exact": 0.0}, "global": {"exact": 1.0, "canaries": 0.5}})
    return one, other


def test_attacks_share_rows_whoever_comes_first(tmp_path):
    filled(tmp_path / "attacks/a.csv")
    assert (tmp_path / "attacks/a.csv").read_text().splitlines() == [
        "round,target,one/canaries,one/exact,other/auc",
        "1,c1,,0.5,",
        "1,global,,0.25,0.75",
        "2,c0,,0.0,",
        "2,global,0.5,1.0,0.875",
    ]


def test_rounds_that_are_trained_again(tmp_path):
    one, other = filled(tmp_path / "a.csv")
    whole = (tmp_path / "a.csv").read_text()
    one.restart(2)
    assert (tmp_path / "a.csv").read_text() == whole
    one.restart(1)
    assert [list(row.values()) for row in table(tmp_path / "a.csv")] == [
        ["1", "c1", "0.5", ""],
        ["1", "global", "0.25", "0.75"],
        ["2", "global", "", "0.875"],  # the other attack's, which speaks for itself
    ]
    other.restart(1)
    other.put(2, {"global": {"auc": 0.875}})
    one.put(2, {"c0": {"exact": 0.0}, "global": {"exact": 1.0, "canaries": 0.5}})
    assert (tmp_path / "a.csv").read_text() == whole
    one.restart(0)
    other.restart(0)
    assert not (tmp_path / "a.csv").exists()
    one.restart(0)  # nothing there


def test_a_round_is_replaced_and_numbers_are_whole(tmp_path):
    one = AttackTable(tmp_path / "a.csv", "one")
    one.put(0, {"global": {"exact": 0.1}})
    one.put(0, {"global": {"exact": 1 / 3}})
    [row] = table(tmp_path / "a.csv")
    assert float(row["one/exact"]) == 1 / 3
    one.put(10, {"a,b": {"exact": 0.5}})
    one.put(9, {"a": {"exact": 0.5}})
    assert list(one.rows()) == [(0, "global"), (9, "a"), (10, "a,b")]


@pytest.mark.parametrize(
    "content", [b"rubbish\n1\n", b"round,target\nx,global\n", b"round,target\n\xff,global\n"]
)
def test_another_file_in_its_place_is_named(content, tmp_path):
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.csv is no table of attacks: move it away"):
        AttackTable(tmp_path / "a.csv", "one").restart(0)
    assert (tmp_path / "a.csv").read_bytes() == content


def test_lines_and_what_is_left_of_later_rounds(tmp_path):
    for number in (0, 1, 2, 10):
        write_json_lines(tmp_path / f"round_{number}/one.jsonl", [{"text": "ü\n", "exact": True}])
        write_json_lines(tmp_path / f"round_{number}/other.jsonl", [])
    assert json.loads((tmp_path / "round_1/one.jsonl").read_text()) == {"text": "ü\n", "exact": True}
    (tmp_path / "round_x").mkdir()
    (tmp_path / "round_x/one.jsonl").touch()
    remove_later(tmp_path, "one.jsonl", 1)
    left = sorted(file.parent.name for file in tmp_path.glob("round_*/one.jsonl"))
    assert left == ["round_0", "round_1", "round_x"]
    assert len([*tmp_path.glob("round_*/other.jsonl")]) == 4
    remove_later(tmp_path, "one.jsonl", 0)
    assert [file.parent.name for file in tmp_path.glob("round_*/one.jsonl")] == ["round_x"]
    remove_later(tmp_path / "nowhere", "one.jsonl", 0)
