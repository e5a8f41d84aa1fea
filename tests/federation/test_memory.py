"""The clients' memories: copies, bounds, versions, checkpoints; in RAM and on disk."""

import io

import pytest
import torch

from fedlight.federation import memory as memory_file
from fedlight.federation.memory import ClientMemories

MIB = 2**20


def disk(folder, **kwargs):
    return ClientMemories(str(folder), limit_mib=0, **kwargs)


def files(folder):
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def through_a_file(state):
    """What a checkpoint gives back."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)


def values(memories, *clients):
    return [memories.load(client).get("w", torch.tensor([-1.0])).item() for client in clients]


def w(value):
    return {"w": torch.tensor([float(value)])}


@pytest.mark.parametrize("limit_mib", [0, 1])
def test_what_is_saved_is_loaded_and_nobody_else_can_change_it(tmp_path, limit_mib):
    memories = ClientMemories(str(tmp_path), limit_mib)
    live = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    given = {"w": live, "nested": {"list": [live, 3, 0.5, "x", None, True]}}
    memories.save("a", given, 0)
    with torch.no_grad():
        live.zero_()
    given["nested"]["list"].append(1)
    for _ in range(2):
        loaded = memories.load("a")
        assert loaded["w"].tolist() == [1.0, 2.0]
        assert not loaded["w"].requires_grad
        assert loaded["nested"]["list"][0].tolist() == [1.0, 2.0]
        assert loaded["nested"]["list"][1:] == [3, 0.5, "x", None, True]
        loaded["w"].zero_()
        loaded["nested"]["list"].clear()
    assert memories.load("b") == {}


def test_a_view_is_saved_without_what_it_is_a_view_of(tmp_path):
    large = torch.zeros(MIB // 4)
    memories = ClientMemories(str(tmp_path), limit_mib=0.5)
    memories.save("a", {"w": large[:2]}, 0)
    assert memories.bytes_in_ram == 8
    assert memories.load("a")["w"].untyped_storage().nbytes() == 8


def test_empty_memories_cost_nothing(tmp_path):
    for memories in (disk(tmp_path / "x"), ClientMemories()):
        memories.save("a", {}, 0)
        assert memories.bytes_in_ram == 0
        assert memories.load("a") == {}
    assert not (tmp_path / "x").exists()
    assert ClientMemories().state_dict(1) == {"memories": {}}


@pytest.mark.parametrize("limit_mib", [0, 1])
def test_a_memory_that_became_empty_is_gone(tmp_path, limit_mib):
    memories = ClientMemories(str(tmp_path), limit_mib)
    memories.save("a", w(1), 0)
    memories.save("a", {}, 1)
    assert memories.load("a") == {}
    assert files(tmp_path) == []
    assert memories.bytes_in_ram == 0


def test_ram_is_bounded_for_many_clients(tmp_path):
    """2,000 clients of 1 KiB each, 256 KiB allowed: the 257th sends all to the disk."""
    folder, limit = tmp_path / "clients", 256 * 1024
    memories = ClientMemories(str(folder), limit_mib=0.25)
    most = 0
    for i in range(2_000):
        memories.save(f"c{i}", {"w": torch.full((256,), float(i))}, round_idx=0)
        most = max(most, memories.bytes_in_ram)
        assert folder.exists() == (i >= 256)
    assert most == limit
    assert memories.bytes_in_ram == 0
    for i in (0, 255, 256, 1_999):
        assert memories.load(f"c{i}")["w"].tolist() == [i] * 256
    state = memories.state_dict(1)
    assert "memories" not in state
    assert len(state["versions"]) == len(files(folder)) == 2_000


def test_a_client_that_takes_the_place_of_its_own_memory_stays_in_ram(tmp_path):
    memories = ClientMemories(str(tmp_path / "clients"), limit_mib=1)
    for round_idx in range(5):
        memories.save("a", {"w": torch.full((MIB // 4,), float(round_idx))}, round_idx)
    assert memories.bytes_in_ram == MIB
    assert not (tmp_path / "clients").exists()


@pytest.mark.parametrize("limit_mib", [0, 1])
def test_a_checkpoint_gives_back_its_own_round(tmp_path, limit_mib):
    memories = ClientMemories(str(tmp_path), limit_mib)
    memories.save("a", w(1), 0)
    memories.save("b", w(2), 0)
    early = through_a_file(memories.state_dict(1))
    memories.save("a", w(3), 1)
    late = through_a_file(memories.state_dict(2))
    memories.save("a", w(4), 2)  # a round that is cut off
    for state, expected in ((early, [1, 2, -1]), (late, [3, 2, -1])):
        again = ClientMemories(str(tmp_path), limit_mib)
        again.load_state_dict(state)
        assert values(again, "a", "b", "c") == expected
        again.save("a", w(9), 1)
    assert values(memories, "a") == [4]
    assert ("memories" in early) == (limit_mib > 0)


def test_versions_that_no_snapshot_names_are_deleted(tmp_path):
    memories = disk(tmp_path, keep=2)
    states = []
    for round_idx in range(6):
        memories.save("a", w(100), round_idx)  # a second visit takes its place
        memories.save("a", w(round_idx), round_idx)
        if round_idx == 0:
            memories.save("b", w(7), round_idx)
        states.append(memories.state_dict(round_idx + 1))
        assert len(files(tmp_path)) == min(round_idx + 1, 2) + 1  # two of a, one of b
    for state, expected in ((states[-1], [5, 7]), (states[-2], [4, 7])):
        again = disk(tmp_path)
        again.load_state_dict(through_a_file(state))
        assert values(again, "a", "b") == expected
    with pytest.raises(
        ValueError, match=r"1 of the 2 .* Resume from a later .* federated.memory.keep above 2"
    ):
        disk(tmp_path).load_state_dict(states[-3])


def test_rounds_without_a_checkpoint_leave_nothing(tmp_path):
    memories = disk(tmp_path)
    for round_idx in range(5):
        memories.save("a", w(round_idx), round_idx)
    assert len(files(tmp_path)) == 1


def test_a_second_snapshot_of_a_round_does_not_spoil_the_first(tmp_path):
    """Such as the one that an interrupted round writes, under the number of rounds done."""
    memories = disk(tmp_path, keep=1)
    memories.save("a", w(1), 0)
    good = memories.state_dict(1)
    memories.save("a", w(2), 1)
    memories.state_dict(1)
    again = disk(tmp_path)
    again.load_state_dict(good)
    assert values(again, "a") == [1]


def test_a_resumed_run_deletes_what_the_first_one_kept(tmp_path):
    first = disk(tmp_path)
    for round_idx in range(3):
        first.save("a", w(round_idx), round_idx)
        state = first.state_dict(round_idx + 1)
    second = disk(tmp_path)
    second.load_state_dict(through_a_file(state))
    for round_idx in range(3, 6):
        second.save("a", w(round_idx), round_idx)
        second.state_dict(round_idx + 1)
    assert values(second, "a") == [5]
    assert len(files(tmp_path)) == 2


def test_two_runs_in_one_folder_do_not_touch_each_other(tmp_path):
    one, two = disk(tmp_path), disk(tmp_path)
    for each in (one, two):
        each.save("a", w(1), 0)
    state = one.state_dict(1)
    two.save("a", w(2), 1)
    again = disk(tmp_path)
    again.load_state_dict(state)
    assert values(again, "a") == [1]


@pytest.mark.parametrize("links", [True, False])
def test_resuming_in_another_folder_leaves_the_first_alone(tmp_path, monkeypatch, links):
    if not links:
        monkeypatch.setattr(memory_file.os, "link", lambda *_: (_ for _ in ()).throw(OSError("another disk")))
    first = disk(tmp_path / "x")
    first.save("a", w(1), 0)
    state = first.state_dict(1)
    before = files(tmp_path / "x")
    for folder in ("y", "z"):  # and from there to a third
        run = disk(tmp_path / folder)
        run.load_state_dict(through_a_file(state))
        assert values(run, "a") == [1]
        state = run.state_dict(1)
    for round_idx in range(1, 5):
        run.save("a", w(round_idx), round_idx)
        run.state_dict(round_idx + 1)
    assert files(tmp_path / "x") == files(tmp_path / "y") == before
    assert len(files(tmp_path / "z")) == 2


def test_a_moved_folder_is_found_as_the_runs_own(tmp_path):
    first = disk(tmp_path / "x")
    first.save("a", w(1), 0)
    state = first.state_dict(1)
    (tmp_path / "x").rename(tmp_path / "moved")
    again = disk(tmp_path / "moved")
    again.load_state_dict(state)
    assert values(again, "a") == [1]


def test_memories_in_a_checkpoint_are_bounded_too(tmp_path):
    first = ClientMemories()
    for client in "abc":
        first.save(client, {"w": torch.full((MIB // 8,), float(ord(client)))}, 0)
    again = ClientMemories(None, limit_mib=1)
    again.open(str(tmp_path / "clients"))
    again.load_state_dict(through_a_file(first.state_dict(1)))
    assert again.bytes_in_ram == 0
    assert len(files(tmp_path / "clients")) == 3
    assert again.load("b")["w"][0] == ord("b")


def test_the_folder_that_was_set_wins_over_the_runs(tmp_path):
    memories = disk(tmp_path / "mine")
    memories.open(str(tmp_path / "runs"))
    memories.save("a", w(1), 0)
    assert len(files(tmp_path / "mine")) == 1
    assert not (tmp_path / "runs").exists()


def test_ids_do_not_become_file_names(tmp_path):
    memories = disk(tmp_path / "clients")
    for client in ("../../etc/passwd", "a/b", "x" * 1000, "é\n"):
        memories.save(client, w(1), 0)
        assert values(memories, client) == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["clients"]
    assert len(files(tmp_path / "clients")) == 4


def test_a_damaged_or_lost_file_is_named(tmp_path):
    memories = disk(tmp_path)
    memories.save("a", w(1), 0)
    (file,) = tmp_path.iterdir()
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    for content in (bytes(data), file.read_bytes()[:100], b""):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=rf"{file.name}, the memory of client 'a', is damaged"):
            memories.load("a")
    file.unlink()
    with pytest.raises(ValueError, match="is gone"):
        memories.load("a")


def test_a_checkpoint_cannot_name_other_files(tmp_path):
    state = {"folder": str(tmp_path), "versions": {}, "snapshots": {1: ["../precious.pt"]}}
    with pytest.raises(ValueError, match=r"'../precious.pt', which is no file of clients' memories"):
        disk(tmp_path).load_state_dict(state)


def test_a_write_that_fails_leaves_the_last_version(tmp_path, monkeypatch):
    memories = disk(tmp_path)
    memories.save("a", w(1), 0)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(memory_file.os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        memories.save("a", w(2), 1)
    assert values(memories, "a") == [1]
    assert len(files(tmp_path)) == 1


def test_what_a_checkpoint_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="holds a set, which a checkpoint cannot"):
        ClientMemories().save("a", {"x": [{1}]}, 0)
    with pytest.raises(ValueError, match=r"there is no folder for them: set federated.memory.folder"):
        ClientMemories(limit_mib=0).save("a", w(1), 0)
    with pytest.raises(ValueError, match=r"limit_mib=-1 must be at least 0"):
        ClientMemories(limit_mib=-1)
    with pytest.raises(ValueError, match="keep=0 must be at least 1"):
        ClientMemories(keep=0)
