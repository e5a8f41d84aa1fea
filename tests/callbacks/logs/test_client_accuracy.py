from contextlib import nullcontext
from math import sqrt

import lightning as L
import pytest
import torch
from judges import MARGINS, Dies, Grouping, Judge, Margins, Saves, fit, trainer
from refusals import refusal
from tiny_world import table

from fedlight.callbacks.logs import client_accuracy
from fedlight.callbacks.logs.client_accuracy import ClientAccuracy, run_steps
from fedlight.federation.algorithms.fedavg import FedAvg

HEADER = "stage,round,client,examples,group,selector,accuracy,own_accuracy,own_both_orders\n"
# a: the vote is right on 2 of 4, selector 0 on all; b: 1 of 2, selector 2 on both; c: 1 of 3, selector 1 on all; d: 0.
TESTED = (
    "test,,a,4,warm,0,0.5,1.0,\ntest,,b,2,warm,2,0.5,1.0,\n"
    "test,,c,3,terse,1,0.3333333333333333,1.0,\ntest,,d,1,terse,0,0.0,0.0,\n"
)
OF_THE_VOTE = {"client_mean": 1 / 3, "client_worst_tenth": 0.0, "client_std": sqrt(1 / 24)}
OF_THEIR_OWN = {"own_client_mean": 0.75, "own_client_worst_tenth": 0.0, "own_client_std": sqrt(0.75 * 0.25)}
GROUPS = "round,client,selector\n1,a,2\n3,a,0\n3,b,2\n3,c,1\n3,d,0\n"


@pytest.fixture
def groups(tmp_path):
    (tmp_path / "groups.csv").write_text(GROUPS)
    return str(tmp_path / "groups.csv")


def of_clients(metrics, stage):
    """The metrics by client of a stage, without its name."""
    return {
        name.removeprefix(f"{stage}/"): float(value)
        for name, value in metrics.items()
        if name.startswith(f"{stage}/") and "client" in name
    }


def run_test(folder, *callbacks, module=None, data=None):
    run = trainer(folder, *callbacks)
    run.test(module or Judge(), datamodule=data or Margins(), verbose=False)
    return of_clients(run.callback_metrics, "test")


def test_test_with_a_file_of_groups(tmp_path, groups):
    metrics = run_test(tmp_path, ClientAccuracy(groups=groups))
    assert metrics == pytest.approx(OF_THE_VOTE | OF_THEIR_OWN)
    assert (tmp_path / "clients.csv").read_text() == HEADER + TESTED
    run_test(tmp_path, ClientAccuracy(groups=groups))  # again
    assert (tmp_path / "clients.csv").read_text() == HEADER + TESTED


def test_without_groups_there_is_no_own_selector(tmp_path):
    path = tmp_path / "logs" / "mine.csv"
    metrics = run_test(tmp_path, ClientAccuracy(str(path)), data=Margins(groups=None))
    assert metrics == pytest.approx(OF_THE_VOTE)
    assert path.read_text().splitlines()[1] == "test,,a,4,,,0.5,,"


def test_a_single_selector_is_everybody_s_own(tmp_path):
    metrics = run_test(tmp_path, ClientAccuracy(worst=0.5), module=Judge(selectors=1))
    # a: 4 of 4, b: none, c: 1 of 3, d: none.
    std = sqrt((4 / 9 + 1 / 9 + 0 + 1 / 9) / 4)
    assert metrics == pytest.approx({"client_mean": 1 / 3, "client_worst_0.5": 0.0, "client_std": std})
    rows = table(tmp_path / "clients.csv")
    assert [row["accuracy"] == row["own_accuracy"] for row in rows] == [True] * 4


def test_validate_is_no_round(tmp_path, groups):
    run = trainer(tmp_path, ClientAccuracy(groups=groups))
    run.validate(Judge(), datamodule=Margins(), verbose=False)
    assert of_clients(run.callback_metrics, "val") == pytest.approx(OF_THE_VOTE | OF_THEIR_OWN)
    assert (tmp_path / "clients.csv").read_text() == HEADER + TESTED.replace("test", "validate")


def test_every_round_that_validates(tmp_path):
    module, run = fit(tmp_path, ClientAccuracy(), check_val_every_n_epoch=2)
    rows = table(tmp_path / "clients.csv")
    assert [(row["round"], row["client"]) for row in rows] == [(r, c) for r in "13" for c in MARGINS]
    assert [row["selector"] for row in rows] == ["0", "2", "1", "0", "0", "2", "1", "1"]
    assert {row["stage"] for row in rows} == {"val"}
    assert of_clients(run.callback_metrics, "val") == pytest.approx(OF_THE_VOTE | OF_THEIR_OWN)
    run.test(module, datamodule=Margins(), verbose=False)  # with the groups that the loop has found
    tested = (tmp_path / "clients.csv").read_text().splitlines()[9:]
    assert tested[3] == "test,,d,1,terse,1,0.0,0.0,"


def test_before_the_first_grouping_and_without_one(tmp_path):
    _, run = fit(tmp_path, ClientAccuracy(), rounds=1)
    assert of_clients(run.callback_metrics, "val") == pytest.approx(OF_THE_VOTE)
    assert (tmp_path / "clients.csv").read_text().splitlines()[1] == "val,0,a,4,warm,,0.5,,"
    _, run = fit(tmp_path, ClientAccuracy(), rounds=1, algorithm=FedAvg())
    assert of_clients(run.callback_metrics, "val") == pytest.approx(OF_THE_VOTE)


def test_a_part_of_the_validation_set(tmp_path):
    fit(tmp_path, ClientAccuracy(), rounds=1, limit_val_batches=1)  # an example of each client
    rows = table(tmp_path / "clients.csv")
    assert [row["examples"] for row in rows] == ["1"] * 4
    assert [row["accuracy"] for row in rows] == ["1.0", "1.0", "0.0", "0.0"]


def test_groups_without_an_example_in_the_pass(tmp_path):
    class Late(Margins):
        def setup(self, stage):
            super().setup(stage)
            self.val_client_indices = {"b": self.client_indices["b"][1:]}  # the first batch has none of them

    _, run = fit(
        tmp_path, ClientAccuracy(), rounds=2, data=Late(), limit_val_batches=1
    )  # grouped in the second
    assert run.current_epoch == 2
    assert not of_clients(run.callback_metrics, "val")


@pytest.mark.parametrize("moment", ["batch", "end"])
@pytest.mark.parametrize("checkpoint", ["validation", "end"])
@pytest.mark.parametrize("round_idx", [1, 3])
def test_killed_and_resumed_equals_uninterrupted(tmp_path, round_idx, moment, checkpoint):
    fit(tmp_path / "whole", ClientAccuracy())
    whole = (tmp_path / "whole/clients.csv").read_text()
    assert whole.count("\n") == 1 + 5 * 4  # and the sanity check has no rows
    with pytest.raises(KeyError, match="killed"):
        fit(tmp_path, ClientAccuracy(), Saves(), Dies(round_idx, moment))
    last = round_idx if moment == "end" else round_idx - 1
    with (tmp_path / "clients.csv").open("a") as file:
        file.write(f"val,{round_idx + 1},a")
    fit(tmp_path, ClientAccuracy(), ckpt_path=tmp_path / f"{checkpoint}{last}.ckpt")
    assert (tmp_path / "clients.csv").read_text() == whole


def test_a_new_run_replaces_the_file_and_more_training_drops_the_test(tmp_path):
    module, run = fit(tmp_path, ClientAccuracy(), Saves(), rounds=2)
    two_rounds = (tmp_path / "clients.csv").read_text()
    run.test(module, datamodule=Margins(), verbose=False)
    assert len((tmp_path / "clients.csv").read_text()) > len(two_rounds)
    fit(tmp_path, ClientAccuracy(), rounds=3, ckpt_path=tmp_path / "end1.ckpt")
    three_rounds = (tmp_path / "clients.csv").read_text()
    assert three_rounds.startswith(two_rounds)
    assert "test" not in three_rounds
    fit(tmp_path, ClientAccuracy(), rounds=2)
    assert (tmp_path / "clients.csv").read_text() == two_rounds


@pytest.mark.parametrize(
    ("module", "data", "why"),
    [
        (Judge(answers=False), Margins(), "the val step of Judge gives no 'correct' and 'vote'"),
        (Judge(), Margins(knows=False), "Margins does not know the clients of the val examples"),
    ],
)
def test_what_cannot_be_said_is_said_once(tmp_path, caplog, module, data, why):
    with caplog.at_level("INFO"):
        _, run = fit(tmp_path, ClientAccuracy(), rounds=3, module=module, data=data)
    assert caplog.text.count(f"ClientAccuracy: {why}, so there is no accuracy by client") == 1
    assert of_clients(run.callback_metrics, "val") == {}
    assert not (tmp_path / "clients.csv").exists()


def test_what_does_not_fit_is_refused(tmp_path, groups):
    with refusal(r"ClientAccuracy.worst=0 must be in \(0, 1\]"):
        ClientAccuracy(worst=0)
    (tmp_path / "other.csv").write_text("client,selector\na,0\n")
    (tmp_path / "empty.csv").write_text("round,client,selector\n")
    for name in ("missing.csv", "other.csv", "empty.csv"):
        with refusal(f"{name} is not a file that GroupLog has written"):
            run_test(tmp_path, ClientAccuracy(groups=str(tmp_path / name)))
    (tmp_path / "others.csv").write_text("round,client,selector\n3,x,0\n")
    with refusal(r"others.csv names none of the 4 clients of the test examples, such as 'a'"):
        run_test(tmp_path, ClientAccuracy(groups=str(tmp_path / "others.csv")))
    with refusal(r"names selector 2, but the model has 1, counted from 0"):
        run_test(tmp_path, ClientAccuracy(groups=groups), module=Judge(selectors=1))


def test_a_grouping_of_the_run_comes_before_the_file(tmp_path, groups):
    loop = L.Callback()
    loop.algorithm = Grouping()
    loop.algorithm.groups = dict.fromkeys(MARGINS, 1)
    run_test(tmp_path, loop, ClientAccuracy(groups=groups))
    rows = table(tmp_path / "clients.csv")
    assert [row["own_accuracy"] for row in rows] == ["0.5", "0.5", "1.0", "0.0"]


class Undecided(Judge):
    """Two selectors, which do not vote."""

    def _evaluate(self, stage, batch):
        return {"correct": super()._evaluate(stage, batch)["correct"]}


def test_without_a_vote_there_is_each_client_s_own_selector_alone(tmp_path):
    (tmp_path / "groups.csv").write_text("round,client,selector\n0,a,0\n0,b,1\n0,c,1\n0,d,0\n")
    metrics = run_test(
        tmp_path, ClientAccuracy(groups=str(tmp_path / "groups.csv")), module=Undecided(selectors=2)
    )
    # a: 4 of 4; b: 1 of 2 by selector 1; c: 3 of 3; d: none.
    shares = [1, 1 / 2, 1, 0]
    std = sqrt(sum((share - 0.625) ** 2 for share in shares) / 4)
    expected = {"own_client_mean": 0.625, "own_client_worst_tenth": 0.0, "own_client_std": std}
    assert metrics == pytest.approx(expected)
    rows = table(tmp_path / "clients.csv")
    assert {row["accuracy"] for row in rows} == {""}
    assert [float(row["own_accuracy"]) for row in rows] == shares


class OfOneArgument(L.LightningModule):
    """Logs the mean of a batch with its size as a tensor, and the largest value, which no sum gives."""

    def validation_step(self, batch):
        self.log("val/mean", batch.mean(), batch_size=torch.tensor(len(batch)))
        self.log("val/largest", batch.max(), batch_size=len(batch), reduce_fx="max")


class OfALoader(OfOneArgument):
    def validation_step(self, batch, batch_idx, dataloader_idx):
        assert dataloader_idx == 0
        super().validation_step(batch)


@pytest.mark.parametrize("kind", [OfOneArgument, OfALoader])
def test_steps_are_called_as_lightning_calls_them(monkeypatch, kind):
    monkeypatch.setattr(client_accuracy, "ready", lambda module, batch: batch)  # no trainer moves it
    module = kind()
    batches = [torch.tensor([1.0, 2.0]), torch.tensor([6.0])]
    outputs, sums = run_steps(module, module.validation_step, nullcontext, batches)
    assert (outputs, sums) == ([None, None], {"val/mean": (9.0, 3)})
    assert type(sums["val/mean"][1]) is int


class OfAnEpoch(OfOneArgument):
    def on_validation_epoch_start(self):
        self.seen = []

    def validation_step(self, batch, batch_idx):
        assert not self.training
        self.seen.append(batch)

    def on_validation_epoch_end(self):
        seen = torch.cat(self.seen)
        self.log("val/median", seen.median(), batch_size=len(seen))


def test_hooks_are_called_around_the_steps(monkeypatch):
    monkeypatch.setattr(client_accuracy, "ready", lambda module, batch: batch)
    module = OfAnEpoch()
    hooks = module.on_validation_epoch_start, module.on_validation_epoch_end
    batches = [torch.tensor([1.0, 2.0]), torch.tensor([6.0])]
    assert run_steps(module, module.validation_step, nullcontext, batches, hooks)[1] == {
        "val/median": (6.0, 3)
    }
