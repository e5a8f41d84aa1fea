import json

import pytest

from fedlight.report.page import LISTING, keep_only


def test_only_what_an_earlier_report_has_listed_is_removed(tmp_path):
    folder, outside = tmp_path / "report_files", tmp_path / "mine.png"
    folder.mkdir()
    names = ("old.png", "old.csv", "kept.png", "notes.txt", "not_listed.png")
    for file in (outside, *(folder / name for name in names)):
        file.touch()
    keep_only(folder, ["old.png", "old.csv", "kept.png"])
    assert all((folder / name).exists() for name in names)  # nothing was listed before
    keep_only(folder, ["kept.png"])
    assert {file.name for file in folder.iterdir()} == {"kept.png", "notes.txt", "not_listed.png", LISTING}
    (folder / LISTING).write_text(json.dumps({"figures": ["../mine.png", str(outside), "notes.txt", 3]}))
    keep_only(folder, [])
    assert outside.exists()
    assert (folder / "notes.txt").exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"figures": 3}', '{"figures": null}', "\udcff"])
def test_a_damaged_list_removes_nothing(tmp_path, text):
    (tmp_path / LISTING).write_bytes(text.encode(errors="surrogateescape"))
    (tmp_path / "x.png").touch()
    keep_only(tmp_path, ["y.png"])
    assert (tmp_path / "x.png").exists()
    assert json.loads((tmp_path / LISTING).read_text()) == {"figures": ["y.png"]}
