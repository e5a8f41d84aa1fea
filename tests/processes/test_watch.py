"""The watch over the processes of a team: in threads, with the end of the process replaced by a note."""

import json
import os
import queue
import socket
import threading
import time

import pytest

from fedlight.federation.client_state import PassingMemories
from fedlight.processes import watch as module
from fedlight.processes.watch import Watch


class Store:
    def __init__(self):
        self.values, self.there = {}, threading.Event()

    def set(self, key, value):
        self.values[key] = value.encode()
        self.there.set()

    def get(self, key):
        self.there.wait(10)
        return self.values[key]


@pytest.fixture
def ended(monkeypatch):
    """Ranks of the processes that have ended, instead of an end."""
    found = queue.Queue()

    def end(self):
        if not self.has_failed:
            found.put((self.rank, self._lost))

    monkeypatch.setattr(Watch, "_end", end)
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.2)
    return found


@pytest.fixture
def team(ended):
    store, made = Store(), {}

    def make(rank):
        made[rank] = Watch(rank, 3, store, "127.0.0.1")

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    watches = [made[rank] for rank in range(3)]
    for one in watches:
        one.begin()
    yield watches
    for one in watches:
        one._at_work = False  # or the real end would end the tests
    for one in watches:
        cut(one)


def cut(watch):
    """Close the connections as the kernel does when a process is killed."""
    watch._tell = lambda **message: None
    for connection, _ in watch._peers.values():
        try:
            connection.shutdown(2)
        except OSError:
            continue


def all_of(ended, number):
    return dict(ended.get(timeout=5) for _ in range(number))


def test_the_others_end_when_one_is_gone(team, ended):
    cut(team[1])
    found = all_of(ended, 3)  # the thread that stands for the one that is gone lives on
    assert {rank: lost for rank, lost in found.items() if rank != 1} == dict.fromkeys(
        (0, 2), "process 1 is gone"
    )


def test_the_others_end_when_the_first_is_gone(team, ended):
    cut(team[0])
    assert {rank: lost for rank, lost in all_of(ended, 3).items() if rank} == dict.fromkeys(
        (1, 2), "process 0 is gone"
    )


def test_an_error_is_said_after_a_grace(team, ended):
    began = time.monotonic()
    team[2].fail("ValueError: no data")
    cut(team[2])
    found = all_of(ended, 2)
    assert set(found.values()) == {"process 2 has failed (ValueError: no data)"}
    assert set(found) == {0, 1}
    assert time.monotonic() - began >= 0.2


def test_processes_that_fail_alike_end_by_themselves(team, ended):
    for one in team:
        one.fail("ValueError: refused")
    with pytest.raises(queue.Empty):
        ended.get(timeout=0.6)


def test_nobody_ends_because_another_is_done(team, ended):
    team[1].rest()
    time.sleep(0.1)
    cut(team[1])
    with pytest.raises(queue.Empty):
        ended.get(timeout=0.5)


def test_a_next_run_is_refused_when_somebody_is_gone_in_between(team, ended):
    for one in (team[0], team[2]):
        one.rest()
    time.sleep(0.1)
    cut(team[1])
    time.sleep(0.2)
    with pytest.raises(ConnectionError, match="process 1 is gone: start all processes again"):
        team[0].begin()


def test_a_forked_process_does_not_keep_the_connections_open(team):
    handles = [connection.fileno() for one in team for connection, _ in one._peers.values()]
    child = os.fork()
    if child == 0:
        os._exit(sum(is_open(handle) for handle in handles))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert all(map(is_open, handles))


def is_open(handle):
    try:
        os.fstat(handle)
    except OSError:
        return False
    return True


def test_a_stranger_is_sent_away():
    store, made = Store(), {}
    first = threading.Thread(target=lambda: made.update(watch=Watch(0, 2, store, "127.0.0.1")))
    first.start()
    there = json.loads(store.get("fedlight/watch"))
    with socket.create_connection(("127.0.0.1", there["port"])) as stranger:
        stranger.sendall(b'{"word": "guess", "rank": 1}\n')
        assert stranger.recv(1) == b""
    other = Watch(1, 2, store, "127.0.0.1")
    first.join(10)
    assert list(made["watch"]._peers) == [1]
    cut(other)


def test_a_process_that_the_watch_ends_leaves_no_temporary_folder(monkeypatch, capsys):
    memories = PassingMemories(limit_mib=0)
    memories.save("a", {"seen": 3}, round_idx=0)
    assert [*memories.folder.iterdir()]
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    watch = Watch.__new__(Watch)
    watch.rank, watch.has_failed, watch._lost = 1, False, "process 0 is gone"
    watch._end()
    assert codes == [1]
    assert not memories.folder.exists()
    assert "process 0 is gone, so process 1 ends too" in capsys.readouterr().err
