import pytest
import torch
from memories import disk, files, saved, through_a_file, values, w

from fedlight.federation import client_state
from fedlight.federation.client_state import ClientMemories, FollowingMemories


def resumed(folder, state):
    memories = disk(folder)
    memories.load_state_dict(through_a_file(state))
    return memories


def test_versions_that_no_snapshot_names_are_deleted(tmp_path):
    memories = disk(tmp_path, recent=2)
    states = []
    for round_idx in range(6):
        memories.save("a", w(100), round_idx)  # a second visit takes its place
        memories.save("a", w(round_idx), round_idx)
        if round_idx == 0:
            memories.save("b", w(7), round_idx)
        states.append(saved(memories, round_idx + 1))
        assert len(files(tmp_path)) == min(round_idx + 1, 2) + 1  # two of a, one of b
    for state, expected in ((states[-1], [5, 7]), (states[-2], [4, 7])):
        assert values(resumed(tmp_path, state), "a", "b") == expected
    with pytest.raises(ValueError, match=r"1 of the 2 .* Resume from a later checkpoint"):
        disk(tmp_path).load_state_dict(states[-3])


@pytest.mark.parametrize("place", ["run", "moved"])
def test_versions_of_a_checkpoint_stay_as_long_as_it_does(tmp_path, place):
    run = tmp_path / "run"
    run.mkdir()
    memories, states = disk(run / "clients"), []
    for round_idx in range(6):
        memories.save("a", w(round_idx), round_idx)
        states.append(saved(memories, round_idx + 1, run / f"{round_idx}.ckpt"))
        saved(memories, round_idx + 1, run / "last.ckpt")  # overwritten: it keeps one round alone
    assert len(files(run / "clients")) == 6
    run = run.rename(tmp_path / place)
    second = disk(run / "clients")
    second.resumed_from = str(run / "3.ckpt")
    second.load_state_dict(through_a_file(states[3]))
    assert values(second, "a") == [3]
    for gone in (0, 2, 3, 4, 5):
        (run / f"{gone}.ckpt").unlink()
    for round_idx in range(4, 7):
        second.save("a", w(10 + round_idx), round_idx)
        saved(second, round_idx + 1, run / "last.ckpt")
    # its checkpoint is there, but not one of the newest
    assert values(resumed(run / "clients", states[1]), "a") == [1]
    with pytest.raises(ValueError, match="1 of the 1 clients' memories"):
        disk(run / "clients").load_state_dict(states[0])


def test_a_kept_round_keeps_what_a_lost_later_one_shared_with_it(tmp_path):
    """Clients ``a`` and ``b``; of six rounds the checkpoints of the first and the last two stay."""
    memories, states = disk(tmp_path / "clients"), []
    for round_idx in range(6):
        memories.save("a", w(round_idx), round_idx)
        if round_idx in (0, 4):
            memories.save("b", w(10 + round_idx), round_idx)
        states.append(saved(memories, round_idx + 1, tmp_path / f"{round_idx}.ckpt"))
        listed = [name for names in states[-1]["snapshots"].values() for name in names]
        assert len(listed) == len(set(listed)) == len(files(tmp_path / "clients"))  # none twice
        if round_idx > 1:
            (tmp_path / f"{round_idx - 1}.ckpt").unlink()
    assert values(resumed(tmp_path / "clients", states[0]), "a", "b") == [0, 10]
    # a and b of the first; both of the last and a of the one before
    assert len(files(tmp_path / "clients")) == 2 + 3


def test_a_second_snapshot_of_a_round_does_not_spoil_the_first(tmp_path):
    """Such as the one that an interrupted round writes, under the number of rounds done."""
    memories = disk(tmp_path, recent=1)
    memories.save("a", w(1), 0)
    good = saved(memories, 1)
    memories.save("a", w(2), 1)
    saved(memories, 1)
    assert values(resumed(tmp_path, good), "a") == [1]
    memories.save("a", w(3), 1)
    saved(memories, 2)
    assert len(files(tmp_path)) == 1


def fails(error):
    def call(*_):
        raise error

    return call


@pytest.mark.parametrize("links", [True, False])
def test_resuming_in_another_folder_leaves_the_first_alone(tmp_path, monkeypatch, links):
    if not links:
        monkeypatch.setattr(client_state.os, "link", fails(OSError("another disk")))
    first = disk(tmp_path / "x")
    first.save("a", w(1), 0)
    state = saved(first, 1)
    before = files(tmp_path / "x")
    for folder in ("y", "z"):  # and from there to a third
        run = resumed(tmp_path / folder, state)
        assert values(run, "a") == [1]
        state = saved(run, 1)
    for round_idx in range(1, 5):
        run.save("a", w(round_idx), round_idx)
        saved(run, round_idx + 1)
    assert files(tmp_path / "x") == files(tmp_path / "y") == before
    assert len(files(tmp_path / "z")) == 2


def test_a_moved_folder_is_found_as_the_runs_own(tmp_path):
    first = disk(tmp_path / "x")
    first.save("a", w(1), 0)
    state = saved(first, 1)
    (tmp_path / "x").rename(tmp_path / "moved")
    assert values(resumed(tmp_path / "moved", state), "a") == [1]


def test_a_run_that_only_evaluates_reads_and_writes_nothing(tmp_path):
    """Lightning gives the callbacks of ``test`` their state back too; nobody opens a folder then."""
    trained = disk(tmp_path / "x")
    trained.save("a", w(1), 0)
    trained.save("b", w(2), 0)
    state = saved(trained, 1)
    before = files(tmp_path / "x")
    for folder in (None, str(tmp_path / "y")):
        evaluating = ClientMemories(folder)
        evaluating.load_state_dict(through_a_file(state))
        assert values(evaluating, "a", "b", "c") == [1, 2, -1]
    assert files(tmp_path / "x") == before
    assert not (tmp_path / "y").exists()
    (tmp_path / "x" / before[0]).unlink()  # the global model can still be evaluated
    evaluating.load_state_dict(through_a_file(state))


def test_ids_do_not_become_file_names_and_the_folder_that_was_set_wins_over_the_runs(tmp_path):
    memories = ClientMemories(str(tmp_path / "clients"), limit_mib=0)
    memories.open(str(tmp_path / "runs"))
    for client in ("../../etc/passwd", "a/b", "x" * 1000, "é\n"):
        memories.save(client, w(1), 0)
        assert values(memories, client) == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["clients"]
    assert len(files(tmp_path / "clients")) == 4


def test_a_damaged_or_lost_file_is_named(tmp_path):
    memories = disk(tmp_path)
    memories.save("a", w(1), 0)
    (file,) = tmp_path.glob("*.pt")
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

    monkeypatch.setattr(client_state.os, "replace", fails(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="the disk is full while writing"):
        memories.save("a", w(2), 1)
    assert values(memories, "a") == [1]
    assert len(files(tmp_path)) == 1


def test_without_checkpoints_no_list_of_written_files_grows(tmp_path):
    memories = ClientMemories(limit_mib=0)
    memories.open(str(tmp_path))
    for number in range(20):
        memories.begin_round()
        for client in "ab":
            memories.save(client, {"seen": number}, number)
        memories.end_round()
    assert memories._unsaved._names == {*memories._versions.values()}
    assert len(files(tmp_path)) == 2


def test_the_order_in_which_processes_send_memories_moves_none_to_disk(tmp_path):
    """One grows before another shrinks; together they stay below the limit."""
    memories = ClientMemories(str(tmp_path), limit_mib=900 / 2**20)
    for client in ("a", "b"):
        memories.save(client, {"w": torch.zeros(100)}, 0)
    memories.take("a", {"w": torch.ones(150)})
    memories.take("b", {"w": torch.ones(50)})
    assert not memories.on_disk
    assert memories.bytes_in_ram == 800
    assert memories.load("b")["w"].sum() == 50


def test_processes_that_do_not_see_one_folder_or_cannot_write_there_say_so(tmp_path):
    first, other = disk(tmp_path / "one"), disk(tmp_path / "other")
    first.save("a", w(1), 0)
    with pytest.raises(ValueError, match=r"is not here, and another process .* a folder that all hosts see"):
        other.take("a", first.sent("a"))
    (tmp_path / "file").touch()
    memories = FollowingMemories(limit_mib=0)
    memories.open(str(tmp_path / "file" / "clients"))
    with pytest.raises(ValueError, match=r"nothing can be written in .*file\. Set trainer\.default_root_dir"):
        memories.save("a", w(1), 0)
