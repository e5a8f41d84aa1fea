import math

import lightning as L
import pytest
import torch
from plain_lightning import trainer as make_trainer
from tiny_world import HELDOUT, VOTES

from fedlight import DPOModule, FedAvg, FederatedLoop, Lora, Optimization, PreferenceDataModule
from fedlight.callbacks.loop.visits.round import TrainingMetrics
from fedlight.datamodules.rows.split import Split


class Noted(DPOModule):
    """Notes the metrics of every training step; `broken` client's loss is infinite."""

    broken, takes_stacked = None, True

    def on_fit_start(self):
        self.noted, self.logged_now, self.client = [], [], None

    def on_visit_start(self, client_id):
        self.client = client_id

    def example_metrics(self, batch):
        metrics = super().example_metrics(batch)
        if not self.training:
            return metrics
        if self.client == self.broken:
            metrics["loss"] = metrics["loss"] * math.inf
        self.noted.append((self.client, {n: v.detach().double() for n, v in metrics.items()}))
        return metrics

    def log_means(self, stage, metrics):
        self.logged_now += [stage] if stage == "train" else []


class EachRound(L.Callback):
    def __init__(self):
        self.found = []

    def on_train_epoch_end(self, trainer, pl_module):
        named = {n: v.item() for n, v in trainer.callback_metrics.items() if n.startswith("train/")}
        self.found.append((named, dict(trainer.progress_bar_metrics), pl_module.noted))
        pl_module.noted = []


def fit(tiny_model, broken=None, callbacks=(), **loop):
    each, sgd = EachRound(), Optimization(name="SGD")
    module = Noted(tiny_model, optimizer=sgd, lr=0.1, lora=Lora(dropout=0.0))
    module.broken = broken
    loop = FederatedLoop(FedAvg(), clients_per_round=3, local_steps=2, **loop)
    trainer = make_trainer(2, [loop, each, *callbacks], num_sanity_val_steps=0)
    split = Split(test_source=HELDOUT)
    data = PreferenceDataModule(VOTES, split=split, view="dpo", tokenizer=tiny_model, batch_size=3)
    trainer.fit(module, datamodule=data)
    return module, loop, each.found


def mean(noted, name):
    return torch.cat([metrics[name] for _, metrics in noted]).mean().item()


def test_a_round_logs_the_mean_over_its_examples_once(tiny_model):
    module, _, rounds = fit(tiny_model)
    assert module.logged_now == []
    for named, shown, noted in rounds:
        assert len(noted) == 6
        assert set(named) == {"train/loss", "train/reward_margin", "train/reward_accuracy"}
        for name, value in named.items():
            assert value == pytest.approx(mean(noted, name.removeprefix("train/")), rel=1e-6, abs=1e-7)
        assert shown["train/loss"] == pytest.approx(named["train/loss"])
    assert rounds[0][0] != rounds[1][0]


def test_clients_in_one_batch_give_the_same_means(tiny_model):
    _, _, alone = fit(tiny_model)
    module, _, beside = fit(tiny_model, clients_at_once=3)
    assert module.logged_now == []
    for (found, *_), (expected, *_) in zip(beside, alone, strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.filterwarnings("ignore:.*diverged")
def test_a_client_that_diverges_is_left_out(tiny_model):
    broken = fit(tiny_model)[-1][0][-1][0][0]  # first client of the first round
    _, _, [(named, _, noted), *_] = fit(tiny_model, broken=broken)
    rest = [(client, metrics) for client, metrics in noted if client != broken]
    assert (len(noted), len(rest)) == (6, 4)
    assert named["train/loss"] == pytest.approx(mean(rest, "loss"), rel=1e-6)


def test_a_run_that_breaks_off_logs_batches_again(tiny_model):
    class Stop(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            raise RuntimeError("stop here")

    with pytest.raises(RuntimeError, match="stop here"):
        fit(tiny_model, callbacks=[Stop()])
    module = DPOModule(tiny_model)
    module.sum_training()
    assert module.training_sums() == []
    assert module._train_sums is None


def test_sums_of_visits_in_any_order_have_the_same_mean():
    parts = [("a", 1e16, 3), ("b", 1.0, 1), ("c", -1e16, 2), ("b", 0.5, 2)]
    for order in (parts, parts[::-1]):
        metrics = TrainingMetrics()
        for client, total, count in order:
            metrics.add(client, {"loss": (total, count)})
        metrics.add("d", {})
        assert metrics.means() == {"loss": 1.5 / 8}
    metrics.leave_out("b")
    assert metrics.means() == {"loss": 0.0}
