from math import sqrt

import pytest
import torch
from judges import MARGINS, Judge, Margins, Saves, fit, trainer
from lightning.pytorch.loggers import CSVLogger
from refusals import refusal
from tiny_world import table

from fedlight import FedAvg, FederatedLoop, LocalOnly, VisitLog
from fedlight.callbacks.logs import ClientAccuracy
from fedlight.callbacks.loop.run import parameters_of
from fedlight.federation.algorithms import GlobalThenLocal
from fedlight.federation.client import OWN_STATE

SHIFTS = {"a": 0.0, "b": 0.25, "c": 1.0, "d": 0.3}


class Owns(FedAvg):
    """Client a would go on with the global model, which stays as it was; the others with a shift of their own."""

    def reply(self, visiting, trained, work):
        client = visiting.client
        if client.id != "a":
            client.memory[OWN_STATE] = {"shift": torch.tensor([SHIFTS[client.id]])}
        return {}

    def finish_visit(self, visiting, movement, work):
        return None


# Shifted by 0.25, nothing of b changes; by 1, all of c is right; d's margins are 0, 0 and 0.25: 0.3 makes one right.
OWN = "own,,a,4,warm,,0.5,0.5,\nown,,b,2,warm,,0.5,0.5,\nown,,c,3,terse,,1.0,1.0,\nown,,d,1,terse,,0.0,0.0,\n"
SUMMARY = {
    "own/client_mean": 0.5,
    "own/client_worst_tenth": 0.0,
    "own/client_std": sqrt(0.5 / 4),
    "own/accuracy": 0.6,
    "own/without_own_model": 1.0,
}


def fit_own(folder, *callbacks, **options):
    accuracy = ClientAccuracy(own_models=True)
    options = {"algorithm": Owns(), "rounds": 2, "limit_val_batches": 0} | options
    return accuracy, *fit(folder, accuracy, *callbacks, **options)


def loop_of(run):
    return next(callback for callback in run.callbacks if isinstance(callback, FederatedLoop))


def test_by_hand(tmp_path, caplog):
    logger = CSVLogger(tmp_path, name="metrics")
    with caplog.at_level("INFO"):
        accuracy, module, run = fit_own(tmp_path, logger=logger, log_every_n_steps=1)
    assert accuracy.summary == pytest.approx(SUMMARY)
    metrics = run.callback_metrics
    assert {name: float(metrics[name]) for name in SUMMARY} == pytest.approx(SUMMARY)
    (file,) = tmp_path.glob("metrics/*/metrics.csv")
    assert float(table(file)[-1]["own/accuracy"]) == 0.6
    assert (tmp_path / "clients.csv").read_text().split("\n", 1)[1] == OWN
    assert "each of 4 clients with its own model: own/accuracy 0.6000  own/client_mean 0.5000" in caplog.text
    # Nothing is left behind.
    assert module.shift.item() == 0.0
    assert module.training
    assert module.mean.update_count == 0
    assert "log" not in vars(module)


def test_parameters_are_back_bit_for_bit():
    layer = torch.nn.Linear(2, 1).double()
    layer.bias.data.fill_(1 / 3)  # which fp32 cannot hold
    weight = layer.weight.detach().clone()
    with pytest.raises(KeyError, match="inside"), parameters_of(layer, {"bias": torch.tensor([2.0])}):
        assert layer.bias.item() == 2.0
        raise KeyError("inside")
    assert layer.bias.item() == 1 / 3
    assert torch.equal(layer.weight, weight)


def test_local_training_equals_a_loop_written_out(tmp_path):
    """Client d has one example, which it sees in each step: shift <- shift - lr * 2 (shift - mean of its margins)."""
    accuracy, module, run = fit_own(tmp_path, VisitLog(), algorithm=LocalOnly(), rounds=5)
    assert module.shift.item() == 0.0
    visits = (tmp_path / "visits.csv").read_text().count(",d,")
    assert 2 <= visits <= 5
    shift = 0.0
    for _ in range(2 * visits):
        shift -= 0.05 * 2 * (shift - 0.25 / 3)
    assert loop_of(run).own_state("d")["shift"].item() == pytest.approx(shift, rel=1e-5)
    # The shift of d is below 0.25 and those of the others below 0.5: each client fares as with the global model.
    assert accuracy.summary["own/client_mean"] == pytest.approx(1 / 3)


def test_a_run_that_had_ended_gives_the_same(tmp_path):
    fit_own(tmp_path, Saves(), limit_val_batches=1.0)
    whole = (tmp_path / "clients.csv").read_text()
    assert whole.endswith(OWN)
    assert whole.count("val,") == 8
    accuracy, _, run = fit_own(tmp_path, limit_val_batches=1.0, ckpt_path=tmp_path / "end1.ckpt")
    assert (tmp_path / "clients.csv").read_text() == whole
    assert accuracy.summary == pytest.approx(SUMMARY)
    assert float(run.callback_metrics["own/accuracy"]) == pytest.approx(0.6)


def test_what_is_missing_is_missed_before_training(tmp_path, caplog):
    with refusal(r"own_models=true needs test examples by client, which Margins does not"):
        fit_own(tmp_path, data=Margins(knows=False))
    with refusal(r"own_models=true needs clients: add a federated loop"):
        trainer(tmp_path, ClientAccuracy(own_models=True)).fit(Judge(), datamodule=Margins())
    with caplog.at_level("INFO"):
        accuracy, _, _ = fit_own(tmp_path, module=Judge(answers=False))
    assert "Judge.test_step gives no 'correct' and 'vote'" in caplog.text
    assert accuracy.summary == {}


def test_clients_that_no_local_round_has_visited_are_tested_with_the_global_model_and_counted(tmp_path):
    """The local rounds sample three of four clients in all."""
    accuracy, module, run = fit_own(tmp_path, algorithm=GlobalThenLocal(1), rounds=2)
    loop = loop_of(run)
    assert sum(loop.own_state(client) is None for client in SHIFTS) == 1
    assert accuracy.summary["own/without_own_model"] == 1
    rows = table(tmp_path / "clients.csv")
    shares = {row["client"]: float(row["own_accuracy"]) for row in rows if row["stage"] == "own"}
    assert len(shares) == 4
    for client, margins in MARGINS.items():
        state = loop.own_state(client) or {"shift": module.shift.detach()}
        right = [2 * sum(margin + state["shift"].item() > 0.5 for margin in own) > 3 for own in margins]
        assert shares[client] == sum(right) / len(right)
