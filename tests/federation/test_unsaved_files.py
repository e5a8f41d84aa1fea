import os
import signal
from pathlib import Path

import pytest
import torch
from holding import end, in_another_process
from killed import at
from memories import disk, files, saved, through_a_file, values, w

from fedlight.federation import ClientMemories, unsaved_files
from fedlight.federation.unsaved_files import UnsavedFiles
from fedlight.support import file_lock
from fedlight.support.file_lock import FileLock

kept = []


def two_rounds(folder, states=None):
    """Round 0 with a checkpoint, written to ``states``; then two clients of round 1 without."""

    def work():
        memories = disk(folder)
        kept.append(memories)
        memories.save("a", w(1), 0)
        memories.save("b", w(2), 0)
        saved(memories, 1, states)
        memories.begin_round()
        memories.save("a", w(3), 1)
        memories.save("c", w(4), 1)

    return work


def resumed(folder, state):
    """Return the memories of a run that goes on from a checkpoint or its state."""
    memories = disk(folder)
    is_file = isinstance(state, Path)
    memories.load_state_dict(torch.load(state, weights_only=True) if is_file else through_a_file(state))
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
    one, two = disk(tmp_path), disk(tmp_path)
    for each in (one, two):
        each.save("a", w(1), 0)
    disk(tmp_path).save("a", w(2), 0)
    assert len(files(tmp_path)) == 3
    state = saved(one, 1)
    two.save("a", w(2), 1)
    assert values(resumed(tmp_path, state), "a") == values(one, "a") == [1]


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
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(os.fstat(handle).st_ino), fsync(handle)))
    memories = disk(tmp_path)
    memories.save("a", w(1), 0)
    memories.save("b", w(1), 0)
    assert synced == []
    state = saved(memories, 1)
    for name in state["versions"].values():
        assert (tmp_path / name).stat().st_ino in synced
    assert tmp_path.stat().st_ino == synced[-1]
    assert values(resumed(tmp_path, state), "a", "b") == [1, 1]


@pytest.mark.parametrize("every", [1, 2])
def test_a_run_with_checkpoints_every_so_often_loses_nothing(tmp_path, every):
    memories = disk(tmp_path)
    for round_idx in range(4):
        memories.begin_round()
        memories.save("a", w(round_idx), round_idx)
        memories.end_round()
        if (round_idx + 1) % every == 0:
            state = saved(memories, round_idx + 1)
    assert values(memories, "a") == [3]
    assert not list(tmp_path.glob("*.unsaved"))
    assert values(resumed(tmp_path, state), "a") == [3]


def dies(owner, name, when=lambda *args, **kwargs: True):
    return at(owner, name, when, signal.SIGKILL)


def second_memory(file, **kwargs):
    seen.append(file)
    return file.suffix == ".pt" and sum(one.suffix == ".pt" for one in seen) == 2


seen = []
KILLS = {  # where a process is killed that writes its second checkpoint, and which of the two is there afterwards
    "before the state is asked for": (dies(ClientMemories, "state_dict"), 1),
    "before it is begun": (dies(ClientMemories, "being_saved"), 1),
    "while its files are brought to the disk": (dies(unsaved_files, "sync"), 1),
    "before it is noted": (dies(UnsavedFiles, "_append", lambda note, line, *_, **__: line[0] == "{"), 1),
    "before it is written": (dies(torch, "save", lambda state, path: isinstance(path, Path)), 1),
    "before old files go": (dies(ClientMemories, "_unlink", lambda memories, names: bool(names)), 2),
    "between two old files": (dies(Path, "unlink", second_memory), 2),
    "before the note is struck": (dies(UnsavedFiles, "end"), 2),
    "before the note goes": (dies(FileLock, "give_back"), 2),
    "afterwards": (lambda: None, 2),
}


@pytest.mark.parametrize(("others", "place"), [(0, "run"), (1, "run"), (1, "moved")])
@pytest.mark.parametrize("moment", KILLS)
def test_whenever_a_process_is_killed_its_newest_checkpoint_is_whole_and_nothing_is_left_over(
    tmp_path, moment, others, place
):
    """With ``recent=1``; ``others`` clients have a memory from the first round alone."""
    run = tmp_path / "run"
    folder = run / "clients"
    prepare, last = KILLS[moment]

    def round_of(memories, number):
        memories.begin_round()
        for client in ("a", "b", "c")[: 2 if number > 1 else 2 + others]:
            memories.save(client, w(number), number - 1)
        memories.end_round()

    def two_rounds():
        memories = disk(folder, recent=1)
        round_of(memories, 1)
        saved(memories, 1, run / "1.ckpt")
        round_of(memories, 2)
        prepare()
        saved(memories, 2, run / "2.ckpt")

    child = os.fork()
    if child == 0:
        try:
            two_rounds()
        finally:
            os._exit(9)
    os.waitpid(child, 0)
    run = run.rename(tmp_path / place)
    folder = run / "clients"
    assert [file.name for file in sorted(run.glob("*.ckpt"))] == ["1.ckpt", "2.ckpt"][:last]
    again = resumed(folder, run / f"{last}.ckpt")
    assert values(again, "a", "b", "c") == [last, last, 1 if others else -1]
    assert [file.suffix for file in folder.iterdir()] == [".pt"] * (2 + others)
    round_of(again, 3)
    saved(again, 3, run / "3.ckpt")
    assert values(resumed(folder, run / "3.ckpt"), "a", "b") == [3, 3]


def test_a_checkpoint_that_could_not_be_written_costs_nothing(tmp_path):
    """The run may go on; the next checkpoint that can be written has the old files removed."""
    memories = disk(tmp_path / "clients", recent=1)
    memories.save("a", w(1), 0)
    first = saved(memories, 1, tmp_path / "1.ckpt")
    memories.save("a", w(2), 1)
    with (
        pytest.raises(OSError, match="No such file"),
        memories.being_saved(memories.state_dict(2), tmp_path / "no/2.ckpt"),
    ):
        (tmp_path / "no/2.ckpt").write_bytes(b"")
    memories.save("a", w(3), 2)
    assert len(files(tmp_path / "clients")) == 3
    assert values(resumed(tmp_path / "clients", first), "a") == [1]
    saved(memories, 3, tmp_path / "3.ckpt")
    assert len(files(tmp_path / "clients")) == 1
    assert not list((tmp_path / "clients").glob("*.unsaved"))


def test_a_checkpoint_that_is_written_in_the_background_is_waited_for(tmp_path):
    memories = disk(tmp_path / "clients", recent=1)
    memories.save("a", w(1), 0)
    saved(memories, 1, tmp_path / "1.ckpt")
    memories.save("a", w(2), 1)
    state = memories.state_dict(2)
    with memories.being_saved(state, tmp_path / "2.ckpt"):
        pass
    assert len(files(tmp_path / "clients")) == 2
    torch.save(state, tmp_path / "2.ckpt")
    memories.save("a", w(3), 2)
    with memories.being_saved(memories.state_dict(3), "memory://3"):
        assert len(files(tmp_path / "clients")) == 2  # of the second, and what is new


def test_what_nobody_can_look_at_is_kept(tmp_path):
    """A kill while a checkpoint goes to an address: neither what it names nor what the one before it names is removed."""
    folder = tmp_path / "clients"

    def work():
        memories = disk(folder, recent=1)
        kept.append(memories)
        memories.save("a", w(1), 0)
        saved(memories, 1)
        memories.save("a", w(2), 1)
        kept.append(memories.being_saved(memories.state_dict(2), "s3://bucket/2.ckpt"))
        kept[-1].__enter__()

    with in_another_process(work) as pid:
        end(pid)
        disk(folder)
    assert len(files(folder)) == 2
    assert not list(folder.glob("*.unsaved"))


def test_a_note_waits_for_a_run_that_looks_at_it(tmp_path, monkeypatch):
    take, held = FileLock.take, iter([False, True])
    monkeypatch.setattr(FileLock, "take", lambda lock: next(held) and take(lock))
    note = UnsavedFiles(tmp_path, "a")
    note.add("file")
    assert (tmp_path / "a.unsaved").read_text() == "file\n"
    note.drop()
