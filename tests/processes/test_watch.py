"""The watch over the processes of a team: in threads, with the end of the process replaced by a note."""

import contextlib
import json
import os
import queue
import socket
import threading
import time

import pytest
import torch

from fedlight.federation.client_state import PassingMemories
from fedlight.processes import watch as module
from fedlight.processes.strategy import ClientParallelStrategy
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
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.05)
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


def test_a_silent_stranger_keeps_nobody_waiting(monkeypatch):
    monkeypatch.setattr("fedlight.processes.watch.HELLO_SECONDS", 0.2)
    store, made = Store(), {}
    first = threading.Thread(target=lambda: made.update(watch=Watch(0, 2, store, "127.0.0.1")))
    first.start()
    there = json.loads(store.get("fedlight/watch"))
    with socket.create_connection(("127.0.0.1", there["port"])) as stranger:
        stranger.settimeout(10)
        assert stranger.recv(1) == b""
        other = Watch(1, 2, store, "127.0.0.1")
        first.join(10)
    assert list(made["watch"]._peers) == [1]
    cut(other)


def test_one_that_is_gone_before_all_are_there_ends_the_others(ended):
    """torch's own rendezvous would wait for the third process."""
    store, found = Store(), queue.Queue()

    def first():
        try:
            Watch(0, 3, store, "127.0.0.1")
        except ConnectionError as error:
            found.put(str(error))

    threading.Thread(target=first, daemon=True).start()
    second = Watch(1, 3, store, "127.0.0.1")
    time.sleep(0.1)
    second._close()
    assert found.get(timeout=5) == "process 1 is gone: start all processes again"


def test_connections_can_be_closed_while_a_message_is_taken(monkeypatch, team):
    """A thread that reads from a closed file dies with an error of its own."""
    taking, may_go_on = threading.Event(), threading.Event()

    def take(self, message, peer):
        taking.set()
        may_go_on.wait(10)

    monkeypatch.setattr(Watch, "_take", take)
    lines = [lines for _, lines in team[0]._peers.values()]
    assert taking.wait(5)
    team[0]._close()
    may_go_on.set()
    until = time.monotonic() + 5
    while not all(one.closed for one in lines) and time.monotonic() < until:
        time.sleep(0.01)
    assert all(one.closed for one in lines)


def silence(watch):
    """Have a process give no more signs of life, as one that is stopped; its connections stay open."""
    watch._tell = lambda **message: None


@pytest.mark.parametrize("rank", [0, 1])
def test_the_others_end_when_one_is_silent(monkeypatch, team, ended, rank):
    monkeypatch.setattr(module, "SILENT_SECONDS", 0.5)
    silence(team[rank])
    if rank == 1:
        silence(team[1])
        expected = {0, 2}
    else:
        expected = {1, 2}
    found = {}
    while not expected <= {*found}:
        who, why = ended.get(timeout=5)
        found[who] = why
    for who in expected:
        assert found[who].startswith(
            f"process {rank} (pid {os.getpid()} on {socket.gethostname()}) is stopped or"
        )


def test_nobody_ends_while_another_one_computes(monkeypatch, team, ended):
    """One that keeps the interpreter busy, with Python and within torch, gives signs of life all the same."""
    monkeypatch.setattr(module, "SILENT_SECONDS", 0.5)
    until, numbers = time.monotonic() + 1.5, torch.rand(300, 300)
    while time.monotonic() < until:
        sum(range(200_000))
        numbers @ numbers
        sorted(range(300_000), key=lambda number: -number)
    assert ended.empty()


def test_one_that_was_stopped_itself_takes_no_other_for_stopped(monkeypatch, team, ended):
    """When it goes on, the signs of life of the others are still to be read."""
    monkeypatch.setattr(module, "SILENT_SECONDS", 0.5)
    sleep = time.sleep
    # All clocks jump by a minute between two beats.
    jump, clock = [0.0], time.monotonic
    monkeypatch.setattr(module.time, "monotonic", lambda: clock() + jump[0])
    jump[0] = 60.0
    sleep(0.3)
    assert ended.empty()


@contextlib.contextmanager
def waiting_for(monkeypatch, team, wait_seconds):
    """Have processes 0 and 2 wait for process 1, whose main thread is elsewhere."""
    monkeypatch.setattr(module, "_place_of_main_thread", lambda: "loader.py:33 in read")
    for one in team:
        one.begin(wait_seconds)
    with team[0].waiting(), team[2].waiting():
        yield


def test_who_has_others_wait_for_too_long_ends_them_where_that_is_bounded(monkeypatch, team, ended):
    with waiting_for(monkeypatch, team, 0.4):
        found = all_of(ended, 3)
    assert found[0].startswith(
        f"process 1 (pid {os.getpid()} on {socket.gethostname()}) is at loader.py:33 in read and"
    )
    assert found[2] == found[0]


def test_a_long_wait_is_said_and_ends_nobody(monkeypatch, capsys, team, ended):
    monkeypatch.setattr(module, "SAID_AFTER_SECONDS", 0.3)
    with waiting_for(monkeypatch, team, None):
        time.sleep(0.8)
    said = [line for line in capsys.readouterr().err.splitlines() if "has waited for" in line]
    name = f"(pid {os.getpid()} on {socket.gethostname()})"
    assert (
        said[0]
        == f"fedlight: process 0 has waited for 0 seconds: process 1 {name} is at loader.py:33 in read"
    )
    assert len(said) <= 3  # after 0.3 and 0.6 seconds, not in each of 16 beats
    assert ended.empty()


def test_a_wait_of_no_time_is_refused():
    with pytest.raises(ValueError, match=r"trainer.strategy.wait_seconds=0 must be above 0"):
        ClientParallelStrategy(wait_seconds=0)


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
