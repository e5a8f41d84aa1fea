import os
import subprocess
import sys
import textwrap

import pytest

from fedlight.support import file_lock, files
from fedlight.support.files import unfinished, whole_file, whole_folder


def killed_while_writing(code, tmp_path):
    head = "import os\nfrom pathlib import Path\nfrom fedlight.support.files import *\n"
    program = head + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, timeout=60, check=False)
    assert done.returncode == -9


def test_a_killed_writer_of_a_file(tmp_path):
    killed_while_writing(
        """
        with whole_file(Path("a.txt")) as new:
            new.write_text("half, and longer than the next one")
            os.kill(os.getpid(), 9)
        """,
        tmp_path,
    )
    assert os.listdir(tmp_path) == ["a.txt.00000000.tmp"]
    with whole_file(tmp_path / "a.txt") as new:
        assert new.read_text() == ""
        new.write_text("whole")
    assert os.listdir(tmp_path) == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "whole"


def test_a_killed_export(tmp_path):
    killed_while_writing(
        """
        with whole_folder(Path("adapter")) as new:
            (new / "below").mkdir()
            (new / "below" / "half").write_text("x")
            os.kill(os.getpid(), 9)
        """,
        tmp_path,
    )
    assert sorted(os.listdir(tmp_path)) == ["adapter.00000000.tmp", "adapter.00000001.tmp"]
    for text in ("first", "second"):  # the second replaces a folder
        with whole_folder(tmp_path / "adapter") as new:
            assert list(new.iterdir()) == []
            (new / "a").write_text(text)
        assert os.listdir(tmp_path) == ["adapter"]
        assert (tmp_path / "adapter" / "a").read_text() == text


def test_two_writers_at_once_write_apart(tmp_path):
    with whole_file(tmp_path / "a") as one:
        with whole_file(tmp_path / "a") as two:
            one.write_text("1")
            two.write_text("2")
        assert (tmp_path / "a").read_text() == "2"
        with whole_file(tmp_path / "a") as three:  # takes the name that is free again
            assert three == two
            assert one.read_text() == "1"
            three.write_text("3")
    assert (tmp_path / "a").read_text() == "1"
    assert os.listdir(tmp_path) == ["a"]


def test_a_writer_that_has_ended_leaves_the_name_to_the_next(tmp_path):
    first = unfinished(tmp_path / "a")
    new = first.__enter__()
    os.replace(new, tmp_path / "a")
    with unfinished(tmp_path / "a") as other:  # the same name, another file
        assert other == new
        first.__exit__(None, None, None)
        assert other.exists()


def test_links_and_what_others_hold_are_left_alone(tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "kept").touch()
    (tmp_path / "a.00000000.tmp").symlink_to(mine)
    with unfinished(tmp_path / "a", is_folder=True) as new:
        assert new.name == "a.00000001.tmp"
    assert (mine / "kept").exists()


def test_an_error_in_the_block_leaves_the_old_folder(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "old").touch()
    with pytest.raises(RuntimeError), whole_folder(tmp_path / "a") as new:
        (new / "new").touch()
        raise RuntimeError
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == ["a", "a/old"]


def test_without_locks_names_are_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(file_lock, "fcntl", None)
    names = iter(("0badcafe", "1badcafe", "2badcafe"))
    monkeypatch.setattr(files.secrets, "token_hex", lambda _: next(names))
    with whole_file(tmp_path / "a") as new:
        assert new.name == "a.0badcafe.tmp"
        new.write_text("x")
    with whole_folder(tmp_path / "b") as new:
        (new / "c").touch()
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
