"""What a killed process wrote after its last checkpoint is removed; what a checkpoint or a living process needs is not."""

import pytest
from holding import end, in_another_process
from memories import disk, files, through_a_file, values, w

from fedlight.federation import file_lock

kept = []


def two_rounds(folder, states=None):
    """Round 0 with a checkpoint, written to ``states``; then two clients of round 1 without."""

    def work():
        import torch

        memories = disk(folder)
        kept.append(memories)
        memories.save("a", w(1), 0)
        memories.save("b", w(2), 0)
        torch.save(memories.state_dict(1), states)
        memories.begin_round()
        memories.save("a", w(3), 1)
        memories.save("c", w(4), 1)

    return work


def resumed(folder, states):
    import torch

    memories = disk(folder)
    memories.load_state_dict(torch.load(states, weights_only=True))
    return memories


def test_the_next_run_removes_what_no_checkpoint_names(tmp_path):
    folder, states = tmp_path / "clients", tmp_path / "states"
    with in_another_process(two_rounds(folder, states)) as pid:
        assert len(files(folder)) == 4
        again = resumed(folder, states)  # while the first one lives
        assert len(files(folder)) == 4
        end(pid)
        again = resumed(folder, states)
        assert values(again, "a", "b", "c") == [1, 2, -1]
        assert len(files(folder)) == 2
        assert [path.suffix for path in folder.iterdir()] == [".pt", ".pt"]


def test_half_written_files_go_as_well(tmp_path):
    def work():
        memories = disk(tmp_path)
        kept.append(memories)
        memories.save("a", w(1), 0)
        (file,) = tmp_path.glob("*.pt")
        file.rename(file.with_name(f"{file.name}.0123abcd.tmp"))  # killed before it was renamed

    with in_another_process(work) as pid:
        end(pid)
        disk(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_two_runs_of_one_process_leave_each_other_alone(tmp_path):
    one = disk(tmp_path)
    one.save("a", w(1), 0)
    disk(tmp_path).save("a", w(2), 0)
    assert len(files(tmp_path)) == 2
    assert values(one, "a") == [1]


def test_files_of_other_names_are_left_alone_whatever_a_note_says(tmp_path):
    precious = tmp_path / "precious.pt"
    precious.touch()
    folder = tmp_path / "clients"
    folder.mkdir()
    for text in ("../precious.pt\n", "\xff\n", "", "[]"):
        (folder / "0123abcd.unsaved").write_bytes(text.encode("latin-1"))
        disk(folder)
        assert list(folder.iterdir()) == []
    assert precious.exists()


def test_without_locks_nothing_is_removed(tmp_path, monkeypatch):
    folder, states = tmp_path / "clients", tmp_path / "states"
    with in_another_process(two_rounds(folder, states)) as pid:
        end(pid)

    def no_locks(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(file_lock.fcntl, "lockf", no_locks)
    before = sorted(folder.iterdir())
    assert values(resumed(folder, states), "a") == [1]
    assert sorted(folder.iterdir()) == before


def test_a_file_is_on_the_disk_before_a_checkpoint_names_it(tmp_path, monkeypatch):
    import os

    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(os.fstat(handle).st_ino), fsync(handle)))
    memories = disk(tmp_path)
    memories.save("a", w(1), 0)
    memories.save("b", w(1), 0)
    assert synced == []
    state = memories.state_dict(1)
    for name in state["versions"].values():
        assert (tmp_path / name).stat().st_ino in synced
    assert tmp_path.stat().st_ino == synced[-1]
    again = disk(tmp_path)
    again.load_state_dict(through_a_file(state))
    assert values(again, "a", "b") == [1, 1]


@pytest.mark.parametrize("every", [1, 2])
def test_a_run_with_checkpoints_every_so_often_loses_nothing(tmp_path, every):
    memories = disk(tmp_path)
    for round_idx in range(4):
        memories.begin_round()
        memories.save("a", w(round_idx), round_idx)
        memories.end_round()
        if (round_idx + 1) % every == 0:
            state = memories.state_dict(round_idx + 1)
    assert values(memories, "a") == [3]
    assert not list(tmp_path.glob("*.unsaved"))
    again = disk(tmp_path)
    again.load_state_dict(through_a_file(state))
    assert values(again, "a") == [3]
