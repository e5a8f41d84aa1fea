import pytest
import torch
from memories import disk, files, saved, through_a_file, values, w

from fedlight.federation.client_state import ClientMemories

MIB = 2**20


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
    memories.save("a", {}, 1)  # a memory that has become empty is gone
    assert memories.load("a") == {}
    assert files(tmp_path) == []
    assert memories.bytes_in_ram == 0


def test_empty_memories_cost_nothing(tmp_path):
    memories = ClientMemories(str(tmp_path), limit_mib=0.5)
    memories.save("a", {"w": torch.zeros(MIB // 4)[:2]}, 0)  # nor does what a view is a view of
    assert memories.bytes_in_ram == 8
    assert memories.load("a")["w"].untyped_storage().nbytes() == 8
    for memories in (disk(tmp_path / "x"), ClientMemories()):
        memories.save("a", {}, 0)
        assert memories.bytes_in_ram == 0
        assert memories.load("a") == {}
    assert not (tmp_path / "x").exists()
    assert ClientMemories().state_dict(1) == {"memories": {}}


def test_ram_is_bounded_for_many_clients(tmp_path):
    """2,000 clients of 1 KiB each, 256 KiB allowed: the 257th sends all to the disk."""
    folder, limit = tmp_path / "clients", 256 * 1024
    memories = ClientMemories(str(folder), limit_mib=0.25)
    for round_idx in range(5):  # one takes the place of its own memory
        memories.save("c0", {"w": torch.full((limit // 4,), float(round_idx))}, round_idx)
    assert memories.bytes_in_ram == limit
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


def test_memories_in_a_checkpoint_are_bounded_too(tmp_path):
    first = ClientMemories()
    for client in "abc":
        first.save(client, {"w": torch.full((MIB // 8,), float(ord(client)))}, 0)
    for opened_first in (True, False):
        folder, again = tmp_path / str(opened_first), ClientMemories(limit_mib=1)
        if opened_first:
            again.open(str(folder))
        again.load_state_dict(through_a_file(first.state_dict(1)))
        assert again.load("b")["w"][0] == ord("b")
        again.open(str(folder))
        assert again.bytes_in_ram == 0
        assert len(files(folder)) == 3
        assert again.load("b")["w"][0] == ord("b")


def test_what_a_checkpoint_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="holds a set, which a checkpoint cannot"):
        ClientMemories().save("a", {"x": [{1}]}, 0)
    with pytest.raises(ValueError, match=r"there is no folder for them: call open"):
        ClientMemories(limit_mib=0).save("a", w(1), 0)


def test_inside_a_round_a_checkpoint_gets_what_was_remembered_before_it(tmp_path):
    """However many clients are saved, in RAM, on disk and where the memories move to the disk in between."""
    for limit_mib, moves in ((1, False), (0, False), (4.5 / 2**20, True)):
        folder = tmp_path / str(limit_mib)
        memories = ClientMemories(str(folder), limit_mib)
        memories.recent = 1
        memories.save("a", w(1), 0)
        assert (memories.bytes_in_ram == 0) == (limit_mib == 0)
        memories.begin_round()
        for value in (2, 3):
            memories.save("a", w(value), 1)
        memories.save("b", w(4), 1)
        assert (memories.bytes_in_ram == 0) == (limit_mib != 1)
        state = through_a_file(memories.state_dict(1))
        assert ("memories" in state) == (moves or limit_mib == 1)
        again = ClientMemories(str(folder))
        again.load_state_dict(state)
        assert values(again, "a", "b") == [1, -1]
        memories.end_round()
        assert values(memories, "a", "b") == [3, 4]
        again = ClientMemories(str(folder))
        again.load_state_dict(through_a_file(saved(memories, 2)))
        assert values(again, "a", "b") == [3, 4]
        assert len(files(folder)) == (0 if limit_mib == 1 else 2)
