import copy
import errno

import pytest

from fedlight.callbacks.loop.round_table import RoundTable

HEADER = "round,stage,loss\n"


def rows(round_idx, *losses, stage="val"):
    return [{"round": round_idx, "stage": stage, "loss": loss} for loss in losses]


@pytest.fixture
def table(tmp_path):
    return RoundTable(tmp_path / "logs" / "table.csv")


def test_a_round_is_added_once(table):
    table.append([])
    assert not table.file.parent.exists()
    for _ in range(2):
        table.append(rows(0, 0.1 + 0.2, 2.0))
    table.append(rows(3, 1))
    assert table.file.read_text() == HEADER + "0,val,0.30000000000000004\n0,val,2.0\n3,val,1\n"
    assert table.last_round == 3


@pytest.mark.parametrize("cut", ["", "2,va", "\n", "2,val,0.5\n"])
def test_going_on_drops_later_rounds_and_a_half_row(table, cut):
    for round_idx in range(2):
        table.append(rows(round_idx, 0.5))
    table.file.write_text(table.file.read_text() + cut)
    again = RoundTable(table.file)
    again.load_state_dict(table.state_before)
    again.restart()
    again.append(rows(0, 9.0))  # is there already
    again.append(rows(1, 0.5))
    assert table.file.read_text() == HEADER + "0,val,0.5\n1,val,0.5\n"
    again.load_state_dict({"last_round": -1, "digest": ""})
    again.restart()
    assert not table.file.exists()


def test_a_copy_goes_on_with_the_same_digest(table):
    table.append(rows(0, 0.5, 0.25))
    again = copy.deepcopy(table)
    table.append(rows(1, 0.5))
    again.append(rows(1, 0.5))
    assert again.state_dict() == table.state_dict()


def test_rows_of_no_round_are_replaced_and_end_with_more_training(table):
    table.append(rows(0, 0.5))
    table.replace("stage", "test", rows("", 0.25, stage="test"))
    table.replace("stage", "test", rows("", 0.125, 0.75, stage="test"))
    assert table.file.read_text() == HEADER + "0,val,0.5\n,test,0.125\n,test,0.75\n"
    table.restart()
    assert table.file.read_text() == HEADER + "0,val,0.5\n"


def test_a_first_row_of_no_round_needs_no_file(table):
    table.replace("stage", "test", rows("", 1, stage="test"))
    assert table.file.read_text() == HEADER + ",test,1\n"


def test_a_full_disk_names_the_file(table, monkeypatch):
    def no_space(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    table.append(rows(0, 0.5))
    monkeypatch.setattr("fedlight.callbacks.loop.round_table.csv_text", no_space)
    for write in (lambda: table.append(rows(1, 0.5)), lambda: table.replace("stage", "test", rows("", 1))):
        with pytest.raises(OSError, match=r"the disk is full while writing .*table\.csv: free some space"):
            write()
    assert table.file.read_text() == HEADER + "0,val,0.5\n"
    assert table.last_round == 0
