import pytest
from judges import Dies, Margins, Saves, fit
from plain_lightning import Metrics

from fedlight.callbacks.logs.group_log import GroupLog
from fedlight.federation.algorithms.fedavg import FedAvg

ROWS = (
    "round,client,selector,loss_0,loss_1,loss_2,known_group\n"
    "1,a,0,0.5,0.25,2.0,warm\n1,b,2,0.5,0.25,2.0,warm\n1,c,1,0.5,0.25,2.0,terse\n1,d,0,0.5,0.25,2.0,terse\n"
    "3,a,0,0.5,0.75,2.0,warm\n3,b,2,0.5,0.75,2.0,warm\n3,c,1,0.5,0.75,2.0,terse\n3,d,1,0.5,0.75,2.0,terse\n"
)


def test_a_row_per_client_and_grouping(tmp_path):
    metrics = Metrics("fed/group")
    fit(tmp_path, GroupLog(), metrics)
    assert (tmp_path / "groups.csv").read_text() == ROWS
    # Round 1: {a, d}, {b}, {c} against {a, b}, {c, d}: no pair of 6 is right, by chance 1 * 2 / 6 would be.
    assert metrics.rounds[0] == {}
    assert metrics.rounds[1] == pytest.approx({"fed/group_ari": (0 - 1 / 3) / (1.5 - 1 / 3)})
    # Round 3: {a}, {b}, {c, d}: d of four clients has moved.
    last = {"fed/group_ari": (1 - 1 / 3) / (1.5 - 1 / 3), "fed/groups_moved": 0.25}
    assert metrics.rounds[3] == metrics.rounds[4] == pytest.approx(last)


def test_without_known_groups(tmp_path):
    _, trainer = fit(tmp_path, GroupLog(str(tmp_path / "logs" / "mine.csv")), data=Margins(groups=None))
    rows = (tmp_path / "logs" / "mine.csv").read_text()
    assert rows == "".join(line.rpartition(",")[0] + "\n" for line in ROWS.splitlines())
    assert trainer.callback_metrics["fed/groups_moved"].item() == 0.25
    assert "fed/group_ari" not in trainer.callback_metrics


@pytest.mark.parametrize("moment", ["batch", "end"])
@pytest.mark.parametrize("round_idx", [1, 2, 3])
def test_killed_and_resumed_equals_uninterrupted(tmp_path, round_idx, moment):
    whole, uninterrupted = Metrics("fed/group"), GroupLog()
    fit(tmp_path / "whole", uninterrupted, whole)
    with pytest.raises(KeyError, match="killed"):
        fit(tmp_path, Dies(round_idx, moment), GroupLog(), Saves())
    checkpoint = tmp_path / f"validation{round_idx - (moment == 'batch')}.ckpt"
    metrics, log = Metrics("fed/group"), GroupLog()
    fit(tmp_path, log, metrics, ckpt_path=checkpoint)
    assert (tmp_path / "groups.csv").read_text() == ROWS
    if round_idx < 3 or moment == "batch":  # else the metrics of round 3 come before its end
        assert metrics.rounds[-1] == whole.rounds[-1]
    assert log.state_dict() == uninterrupted.state_dict()


def test_a_resumed_run_drops_groupings_that_it_makes_again(tmp_path):
    fit(tmp_path, GroupLog(), Saves())
    with (tmp_path / "groups.csv").open("a") as file:
        file.write("3,a")
    fit(tmp_path, GroupLog(), ckpt_path=tmp_path / "end1.ckpt")
    assert (tmp_path / "groups.csv").read_text() == ROWS
    fit(tmp_path, GroupLog(), rounds=2)  # a new run
    assert (tmp_path / "groups.csv").read_text() == ROWS[: ROWS.index("3,")]


def test_an_algorithm_that_does_not_group(tmp_path, caplog):
    with caplog.at_level("INFO"):
        fit(tmp_path, GroupLog(), algorithm=FedAvg(), rounds=2)
    assert caplog.text.count("GroupLog: no algorithm that groups clients") == 1
    assert not (tmp_path / "groups.csv").exists()
