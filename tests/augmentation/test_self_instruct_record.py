import json

import pytest
from scripted_generator import CLIENTS, Scripted, rows, unlike

from fedlight.augmentation.self_instruct.self_instruct import SelfInstruct


def test_a_run_that_was_killed_goes_on_and_makes_what_it_would_have_made(tmp_path):
    def write(number):
        return "" if number % 4 == 1 else unlike(number)

    whole = SelfInstruct(9, Scripted(write), batch_size=4, folder=str(tmp_path / "whole"))
    expected = whole.augment(CLIENTS, [], seed=0)
    dying = Scripted(write, fail_after=7)  # three batches of two calls, and the instructions of the fourth
    with pytest.raises(OSError, match="gone"):
        SelfInstruct(9, dying, batch_size=4, folder=str(tmp_path / "own")).augment(CLIENTS, [], seed=0)
    assert len(dying.instructions) == 16
    going_on = Scripted(lambda number: write(12 + number))
    again = SelfInstruct(9, going_on, batch_size=4, folder=str(tmp_path / "own"))
    assert again.augment(CLIENTS, [], seed=0) == expected
    assert going_on.draws == whole.generator.draws[6:]
    assert len(going_on.instructions) == len(whole.generator.instructions) - 12
    assert again.record() == whole.record()
    (one,), (other,) = ((tmp_path / name).iterdir() for name in ("own", "whole"))
    assert one.read_bytes() == other.read_bytes()


def test_a_run_that_is_given_again_asks_nothing(tmp_path):
    options = {"folder": str(tmp_path)}
    first = SelfInstruct(3, Scripted(), **options).augment(CLIENTS, [], seed=0)
    silent = Scripted(fail_after=0)
    assert SelfInstruct(3, silent, **options).augment(CLIENTS, [], seed=0) == first
    assert not silent.calls


@pytest.mark.parametrize("change", ["seed", "number", "rows", "limit", "generator"])
def test_whoever_changes_anything_begins_anew(change, tmp_path):
    class Other(Scripted):
        pass

    SelfInstruct(3, Scripted(), folder=str(tmp_path)).augment(CLIENTS, [], seed=0)
    generator = Other() if change == "generator" else Scripted()
    number, limit = 4 if change == "number" else 3, 0.6 if change == "limit" else 0.7
    clients = {**CLIENTS, "c1": rows("saturn", "venus")} if change == "rows" else CLIENTS
    trying = SelfInstruct(number, generator, max_rouge_l=limit, folder=str(tmp_path))
    trying.augment(clients, [], seed=int(change == "seed"))
    assert generator.calls
    assert len(list(tmp_path.iterdir())) == 2


def test_a_torn_last_line_is_made_again_and_a_damaged_one_before_is_refused(tmp_path):
    options = {"batch_size": 2, "folder": str(tmp_path)}
    expected = SelfInstruct(3, Scripted(), **options).augment(CLIENTS, [], seed=0)
    (file,) = tmp_path.iterdir()
    lines = file.read_bytes().splitlines(keepends=True)
    assert len(lines) == 4
    assert json.loads(lines[0])["class"] == "SelfInstruct"
    file.write_bytes(b"".join(lines[:3]) + lines[3][:-9])
    again = Scripted(lambda number: unlike(4 + number))
    assert SelfInstruct(3, again, **options).augment(CLIENTS, [], seed=0) == expected
    assert (len(again.instructions), file.read_bytes()) == (2, b"".join(lines))
    file.write_bytes(b"".join([lines[0], b"[1]\n", *lines[2:]]))
    with pytest.raises(ValueError, match="line 2 is damaged; delete the lines from there on"):
        SelfInstruct(3, Scripted(), **options).augment(CLIENTS, [], seed=0)
