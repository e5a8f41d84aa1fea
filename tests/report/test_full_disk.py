import errno
import json
import os
from pathlib import Path

import pytest

from fedlight.report import page
from fedlight.report.page import write_report
from fedlight.support.files import csv_text


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"commands": []}))
    rows = [
        {"round": r, "client": f"c{c}", "loss": 1 / (1 + r + c), "bytes_down": 9, "bytes_up": 9}
        for r in range(3)
        for c in range(2)
    ]
    (folder / "visits.csv").write_text(csv_text(rows))
    return folder


def tree(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("where", ["picture", "table", "page"])
def test_it_leaves_nothing(run, monkeypatch, where):
    before = tree(run)
    places = {"picture": (page, "save_png"), "table": (Path, "write_bytes"), "page": (Path, "write_text")}
    monkeypatch.setattr(*places[where], full)
    with pytest.raises(OSError, match=r"the disk is full while writing .*report\.html: free some space"):
        write_report([run])
    assert tree(run) == before
    assert not [path for path in run.rglob("*") if path.is_dir()]


def test_it_leaves_the_earlier_page(run, monkeypatch):
    write_report([run])
    (run / "report_files" / "mine.txt").touch()
    before = tree(run)
    assert {"report.html", "report_files/files.json", "report_files/mine.txt"} < before.keys()
    with monkeypatch.context() as patched, pytest.raises(OSError, match="the disk is full"):
        patched.setattr(page, "save_png", full)
        write_report([run])
    assert tree(run) == before
    os.rename(run / "report_files", run / "report_files.00000000.tmp")  # as a killed report leaves them
    write_report([run])
    assert sorted(os.listdir(run)) == ["report.html", "report_files", "run.json", "visits.csv"]
    assert tree(run).keys() == before.keys() - {"report_files/mine.txt"}
