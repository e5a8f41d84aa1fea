import errno
import json
import os
import time

import pytest
from holding import end, in_another_process

from fedlight.support import file_lock
from fedlight.support.file_lock import FileLock, holder, this_process


def test_a_second_process_does_not_get_it_and_learns_who_has_it(tmp_path):
    file = tmp_path / "a.lock"
    theirs = {"command": "fedlight run demo"}
    with in_another_process(lambda: FileLock(file).take({**this_process(), **theirs})) as pid:
        assert not FileLock(file).take(this_process())
        assert holder(file).startswith(f"process {pid} on ")
        assert holder(file).endswith("(fedlight run demo)")
        end(pid)
        assert file.exists()  # nobody was there to remove it
        mine = FileLock(file)
        assert mine.take(this_process())
        assert json.loads(file.read_text())["pid"] == os.getpid()
    mine.give_back()
    assert not file.exists()


def test_a_forked_worker_does_not_keep_the_lock_of_a_killed_process(tmp_path):
    file = tmp_path / "a.lock"

    def take_and_fork():
        FileLock(file).take(this_process())
        if os.fork() == 0:
            os.setpgid(0, 0)
            time.sleep(2)
            os._exit(0)

    with in_another_process(take_and_fork) as pid:
        end(pid)
        assert FileLock(file).take(this_process())


def test_given_back_it_is_free_and_a_number_that_is_in_use_again_does_not_keep_it(tmp_path):
    def take_and_give_back():
        lock = FileLock(tmp_path / "a.lock")
        lock.take()
        lock.give_back()

    with in_another_process(take_and_give_back):
        assert FileLock(tmp_path / "a.lock").take()
    """The file of a dead process names a number that another, living one has by now."""
    file = tmp_path / "a.lock"
    file.write_text(json.dumps({**this_process(), "pid": os.getppid()}))
    assert FileLock(file).take(this_process())


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', "\0\0"])
def test_a_damaged_lock_file_is_no_obstacle(tmp_path, text):
    file = tmp_path / "a.lock"
    file.write_text(text)
    assert holder(file) == "another process"
    assert FileLock(file).take(this_process())
    assert f"process {os.getpid()} " in holder(file)


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(file_lock.fcntl, "lockf", no_locks)
    lock = FileLock(tmp_path / "a.lock")
    assert lock.take()
    assert not lock.supported
