import os
from pathlib import Path

import pytest

from fedlight.support.files import full_disk_named, remove_unfinished, whole_file, write_whole


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path):
    file = tmp_path / "below" / "a.txt"
    write_whole(file, "old é")
    with pytest.raises(RuntimeError), whole_file(file) as new:
        new.write_text("half")
        raise RuntimeError
    assert [path.name for path in file.parent.iterdir()] == ["a.txt"]
    assert file.read_bytes() == "old é".encode()


def test_content_and_name_are_brought_to_the_disk_in_this_order(tmp_path, monkeypatch):
    seen = []
    inodes = {}
    fsync, replace = os.fsync, os.replace

    def note_sync(handle):
        seen.append(("sync", os.fstat(handle).st_ino))
        fsync(handle)

    def note_replace(source, target):
        inodes["file"] = os.stat(source).st_ino
        seen.append(("replace", inodes["file"]))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_replace)
    write_whole(tmp_path / "a.txt", b"1")
    assert seen == [("sync", inodes["file"]), ("replace", inodes["file"]), ("sync", tmp_path.stat().st_ino)]


def test_a_disk_that_fails_is_no_success(tmp_path, monkeypatch):
    def fails(_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="Input/output error"):
        write_whole(tmp_path / "a.txt", "x")
    assert list(tmp_path.iterdir()) == []


def test_only_what_a_kill_left_is_removed(tmp_path):
    other = tmp_path / "other"
    for folder in (tmp_path, tmp_path / "below", other):
        folder.mkdir(exist_ok=True)
        for name in ("a.csv.0123abcd.tmp", "mine.tmp", "a.csv", "0123abcd.tmp.csv"):
            (folder / name).touch()
    (other / "run.lock").touch()  # another run is at work there
    assert remove_unfinished(tmp_path, but_below="run.lock") == 2
    kept = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()}
    plain = {"mine.tmp", "a.csv", "0123abcd.tmp.csv"}
    assert kept == plain | {f"below/{name}" for name in plain} | {
        f"other/{name}" for name in (*plain, "run.lock", "a.csv.0123abcd.tmp")
    }


def test_names_the_file_and_the_remedy_and_no_other_error(tmp_path):
    with (
        pytest.raises(OSError, match=r"the disk is full while writing runs/x\.csv: free some space"),
        full_disk_named(Path("runs/x.csv")),
        open("/dev/full", "w") as file,
    ):
        file.write("a row\n")
    with pytest.raises(FileNotFoundError, match="missing"), full_disk_named(Path("runs/x.csv")):
        (tmp_path / "missing.csv").read_text()
