import os
from datetime import timedelta
from hashlib import blake2b
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.utilities import rank_zero_only
from plain_lightning import Numbers, Regression, assert_equal, module, ten_clients, trainer, weights
from ranks import log_of, run_ranks, start_ranks, wait_for
from refusals import refusal
from thread_team import on_team
from torch.utils.data import DataLoader, TensorDataset

from fedlight import ByClient, Client, ClientParallelStrategy, FedAvg, FederatedLoop, Scaffold, Visit, Work
from fedlight.callbacks.attacks import MembershipInference
from fedlight.callbacks.loop.guard import refuse_cut_rounds
from fedlight.callbacks.loop.parts import optimizers
from fedlight.callbacks.loop.ranks.ranks import (
    KeptByAlgorithm,
    _digest,
    agree_on_model,
    agree_on_monitored,
    refuse_uneven,
    refuse_unmergeable,
    same_start,
)
from fedlight.federation import Aggregation, CoordinateMedian, WeightedSum
from fedlight.processes import ALONE, Team, current_team

TWO = Team(0, 2, lambda data: [data, data])


class Uploads(L.Callback):
    def on_upload(self, upload):
        pass


class SharedUploads(Uploads):
    shares_uploads = True


@pytest.mark.parametrize(
    ("callback", "complaint"),
    [
        (ModelCheckpoint(every_n_train_steps=5), r"every_n_train_steps=.* inside a round.*every_n_epochs"),
        (ModelCheckpoint(train_time_interval=timedelta(minutes=1)), "train_time_interval=.*every_n_epochs"),
        (Timer("00:01:00:00"), r"max_time and Timer .*interval='epoch'"),
        (Uploads(), r"Uploads.on_upload sees .*shares_uploads = True; or set trainer.devices=1"),
    ],
)
def test_callbacks_that_work_by_one_process_are_refused(callback, complaint):
    fine = [ModelCheckpoint(every_n_epochs=2), Timer("00:01:00:00", interval="epoch"), SharedUploads()]
    fine.append(MembershipInference.__new__(MembershipInference))
    refuse_uneven(SimpleNamespace(callbacks=fine))
    with refusal(complaint):
        refuse_uneven(SimpleNamespace(callbacks=[*fine, callback]))


class Mean(Aggregation):
    """Mean of updates that it keeps for itself."""

    def add(self, update):
        raise NotImplementedError

    def result(self):
        raise NotImplementedError


class HalfMergeable(Mean):
    def partial(self):
        return {}


@pytest.mark.parametrize(("kind", "lacks"), [(Mean, "partial"), (HalfMergeable, "merge")])
def test_an_aggregation_of_one_process_is_refused(monkeypatch, kind, lacks):
    monkeypatch.setattr("fedlight.callbacks.loop.federated_loop.current_team", lambda: TWO)
    run = trainer(1, [FederatedLoop(aggregation=kind(), clients_per_round=2), ByClient(ten_clients)])
    with refusal(rf"{kind.__name__} has no {lacks}, .* add partial\(\) and merge"):
        run.fit(module(), Numbers())
    for aggregation in (CoordinateMedian(), WeightedSum("weight")):
        refuse_unmergeable(aggregation)


class Counting(FedAvg):
    def __init__(self):
        super().__init__()
        self.visits, self.seen, self.total = 0, [], torch.zeros(2)

    def finish_visit(self, visiting, movement, work):
        getattr(self, f"count_{self.how}")(visiting)
        return super().finish_visit(visiting, movement, work)

    def count_number(self, visiting):
        self.visits += 1

    def count_list(self, visiting):
        self.seen.append(visiting.client.id)

    def count_tensor(self, visiting):
        self.total.add_(1)

    def count_own(self, visiting):
        visiting.notes["visits"] = 1


def visited(algorithm):
    kept = KeptByAlgorithm(algorithm)
    kept.start_round()
    client = Client("a", 1, 1.0)
    visiting = algorithm.start_visit(Visit("a", 1), client, {"w": torch.zeros(1)})
    algorithm.finish_visit(visiting, {"w": torch.ones(1)}, Work(1, 0.1, 1.0, 0.0))
    kept.visited()


@pytest.mark.parametrize(("how", "name"), [("number", "visits"), ("list", "seen"), ("tensor", "total")])
def test_an_algorithm_that_keeps_something_in_its_attributes_is_refused(how, name):
    """And none that keeps it in the visit, or says what it adds up."""
    algorithm = Counting()
    algorithm.how = "own"
    visited(algorithm)
    visited(Scaffold())
    algorithm.how = how
    with refusal(rf"a visit changes Counting\.{name}, .*partial\(\) and merge"):
        visited(algorithm)


def test_processes_with_unlike_values_to_decide_by_are_refused(monkeypatch):
    def body(rank):
        metrics = {"val/loss": torch.tensor(0.5), "train/loss": torch.tensor(float(rank))}
        run = SimpleNamespace(
            callbacks=[ModelCheckpoint(monitor="val/loss")], callback_metrics=metrics, lr_scheduler_configs=[]
        )
        agree_on_monitored(current_team(), run)
        run.callbacks.append(ModelCheckpoint(monitor="train/loss"))
        with refusal(r"monitor=train/loss: .* monitor a value of validation"):
            agree_on_monitored(current_team(), run)

    on_team(monkeypatch, 2, body)


class Plateau(Regression):
    """Lowers its rate by the loss of its own clients."""

    def on_train_epoch_end(self):
        self.log("train/last", self.trainer.callback_metrics["fed/loss"] + self.trainer.global_rank)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "train/last"}}


class Last(Plateau):
    def configure_optimizers(self):
        return Regression.configure_optimizers(self)


class Unseeded(Numbers):
    """Data that each process draws for itself."""

    def setup(self, stage):
        super().setup(stage)
        self.data = TensorDataset(torch.randn(120, 4, generator=torch.Generator()), self.data.tensors[1])
        if os.environ["LOCAL_RANK"] == "1":
            self.data.tensors[0].add_(1)


STOPS = EarlyStopping("train/last", check_on_train_epoch_end=True, stopping_threshold=1e9)


@pytest.mark.parametrize(
    ("model", "data", "callbacks", "settings", "complaint"),
    [
        (Plateau, Numbers, [], [{}, {}], "ValueError: monitor=train/last: under trainer.strategy=client_parallel"),
        (Last, Numbers, [STOPS], [{}, {}], "ValueError: monitor=train/last: under trainer.strategy"),
        (Regression, Unseeded, [], [{}, {}], "ValueError: data.first_examples is digest "),
        (Regression, Numbers, [], [{"rounds": 1}, {"rounds": 2}], "ValueError: trainer.max_epochs is "),
        (Regression, Numbers, [], [{}, {"gradient_clip_val": 1.0}], "ValueError: trainer.gradient_clip_val is "),
        (Regression, Numbers, [], [{"lr": 0.1}, {"lr": 0.2}], "ValueError: optimizers[0] is {'class': 'AdamW', "),
    ],
    ids=["plateau", "logged when the round ends", "unseeded data", "rounds", "clipping", "optimizer"],
)  # fmt: skip
def test_what_processes_have_unlike_is_refused_in_each(tmp_path, model, data, callbacks, settings, complaint):
    def work(rank):
        own = {"rounds": 1, "lr": 0.05, **settings[rank]}
        L.seed_everything(0, verbose=False)
        made = model(lr=own.pop("lr"))
        parts = [FederatedLoop(clients_per_round=4, local_steps=1), ByClient(ten_clients), *callbacks]
        trainer(callbacks=parts, strategy="client_parallel", devices=2, **own).fit(made, data())

    assert wait_for(start_ranks(2, work, tmp_path), 60) == [1, 1]
    for rank in range(2):
        assert complaint in log_of(tmp_path, rank)


def test_kernels_of_optimizers_may_be_unlike(tmp_path):
    """A process with a GPU does without the kernel that another one takes on its processor."""

    def work(rank):
        if rank:
            optimizers.use_fused_kernels = lambda given: None
        L.seed_everything(0, verbose=False)
        made = Regression(lr=0.05)
        parts = [FederatedLoop(clients_per_round=4, local_steps=1), ByClient(ten_clients)]
        trainer(1, parts, strategy="client_parallel", devices=2).fit(made, Numbers())
        return made.trainer.optimizers[0].param_groups[0]["fused"], weights(made)

    (here, ours), (there, theirs) = run_ranks(2, work, tmp_path)
    assert (here, there) == (True, None)
    assert_equal(ours, theirs)


def test_a_digest_is_the_same_in_processes_that_are_no_forks_of_one():
    values = blake2b(np.array([0.0, 1.0, 2.0]).tobytes()).hexdigest()
    expected = f"{{'x': ['tensor', 'torch.int64', {values}], 'y': ['a', 1.5, None]}}"
    assert _digest({"x": torch.arange(3), "y": ["a", 1.5, None]}) == expected


def test_examples_that_worker_processes_read_are_not_read_to_compare_them():
    class Loaded(Numbers):
        def train_dataloader(self):
            return DataLoader(self.data, batch_size=4, num_workers=2)

    run = trainer(1, [ByClient(ten_clients), FederatedLoop(clients_per_round=2, local_steps=1)])
    run.fit(module(), Loaded())
    assert run.fit_loop._data_source.first_examples() is None


def test_processes_with_unlike_data_or_global_models_are_refused(monkeypatch):
    def body(rank):
        agree_on_model(current_team(), {"w": torch.ones(3)})
        with refusal(rf"processes {rank} and {1 - rank} unlike global models \(w\)"):
            agree_on_model(current_team(), {"w": torch.tensor([1.0, 1.0, 1.0 + rank * 1e-7])})
        with refusal(rf"data.clients is {7 + rank} in process {rank} and {8 - rank}"):
            same_start(current_team(), module(), {"seed": 1, "data.clients": 7 + rank})

    on_team(monkeypatch, 2, body)


def test_unlike_weights_are_those_of_the_first_process(monkeypatch):
    models = [module(seed) for seed in (3, 4)]
    expected = {name: value.clone() for name, value in models[0].state_dict().items()}
    assert not torch.equal(models[1].net[0].weight, expected["net.0.weight"])
    on_team(monkeypatch, 2, lambda rank: same_start(current_team(), models[rank], {}))
    for model in models:
        for name, value in model.state_dict().items():
            assert torch.equal(value, expected[name])


def test_torchrun_or_another_strategy_is_refused_and_names_the_one_that_works(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with refusal(r"torchrun has started 2 processes.*--trainer.strategy client_parallel"):
        refuse_cut_rounds(trainer(devices=1, strategy="auto"), 0)
    with refusal(r"--trainer.strategy client_parallel"):
        refuse_cut_rounds(trainer(devices=2, strategy="ddp_spawn"), 0)


def test_more_processes_than_devices_are_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(rank_zero_only, "rank", 0)  # which Lightning sets: later tests would log nothing
    strategy = ClientParallelStrategy(parallel_devices=[torch.device("cuda", 0)])
    strategy.cluster_environment = LightningEnvironment()
    with refusal(r"process 1 is number 1 on its host.*gives 1 there"):
        strategy.set_world_ranks()


def test_one_device_is_one_process():
    loop = FederatedLoop(clients_per_round=2, local_steps=1)
    run = trainer(1, [loop, ByClient(ten_clients)], strategy=ClientParallelStrategy(), devices=1)
    run.fit(module(), Numbers())
    assert loop.rounds_done == 1
    assert run.strategy.team is ALONE


def test_a_run_without_a_federation_is_refused_by_each_process(tmp_path):
    def work(rank):
        trainer(1, strategy="client_parallel", devices=2).fit(module(), Numbers())

    assert wait_for(start_ranks(2, work, tmp_path), 60) == [1, 1]
    for rank in range(2):
        assert "ValueError: trainer.strategy=client_parallel shares out" in log_of(tmp_path, rank)
        assert "so process" not in log_of(tmp_path, rank)
