import lightning as L
import pytest
import torch
from fleets import make_fleet, rounds_of
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from plain_lightning import Numbers, Regression, module, ten_clients, trainer
from refusals import refusal

from fedlight import ClipAndNoise, FederatedLoop, FederatedWrapper, FewFedPIT, PrivateMean, Visit, Wire
from fedlight.callbacks.loop.parts import AveragedBuffers, ProductError
from fedlight.callbacks.loop.parts.buffered import Buffered
from fedlight.federation.algorithms import FedAvg, FedBiscuit, GlobalThenLocal, LocalOnly, Scaffold
from fedlight.federation.algorithms.lora import FlexLoRA, HetLoRA, ProductAverage, RoLoRA
from fedlight.federation.algorithms.self_made import FedMIT, FewFedWeight, LocalSelfGeneration
from fedlight.federation.asynchronous import FedBuff, ServerStep
from fedlight.federation.forward import FedKSeed

MODE = r"buffered rounds: "


WAITING = "are for rounds that wait .* leave them out"


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"buffered": "async"}, "buffered='async' must be a FedBuff"),
        ({"buffered": FedBuff(), "deadline_seconds": 5.0}, f"deadline_seconds=5.0 and fleet.* {WAITING}"),
        ({"buffered": FedBuff(), "over_selection": 1.5}, f"over_selection=1.5 {WAITING}"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, complaint, tmp_path):
    with refusal(complaint):
        make_fleet(tmp_path, phone={}, **settings)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"clients_per_round": 11}, "clients_per_round=11 is more than .*: set clients_per_round=10 or less"),
        ({"buffered": FedBuff(2, concurrency=11)}, "concurrency=11 is more than the 10 clients of the data"),
        ({"buffered": FedBuff(11)}, "buffer_size=11 is more than the 10 clients of the data"),
        ({"parts": [AveragedBuffers()]}, MODE + "AveragedBuffers .* take LocalBuffers"),
        ({"aggregation": PrivateMean(1.0, 0.5, delta=0.01)}, MODE + "epsilon is computed for cohorts"),
        ({"channel": Wire(up=ClipAndNoise(1.0, 0.5, delta=0.01))}, MODE + "epsilon is computed for cohorts"),
        ({"algorithm": Scaffold()}, MODE + "Scaffold has start_round, .* take FedAvg, FedProx"),
        ({"algorithm": FedBiscuit(1, 2)}, MODE + "FedBiscuit has prepare_round"),
        ({"algorithm": FewFedPIT()}, MODE + "FewFedPIT has prepare_round"),
        ({"algorithm": FedMIT()}, MODE + "FedMIT has prepare_round"),
        ({"algorithm": FewFedWeight()}, MODE + "FewFedWeight has prepare_round"),
        ({"algorithm": LocalSelfGeneration()}, MODE + "LocalSelfGeneration has prepare_round"),
        ({"algorithm": GlobalThenLocal(1)}, MODE + "GlobalThenLocal has prepare_round"),
        ({"algorithm": ProductAverage()}, MODE + "ProductAverage has start_round"),
        ({"algorithm": HetLoRA()}, MODE + "HetLoRA has an aggregation of its own, no weighted sum"),
        ({"algorithm": FlexLoRA()}, MODE + "FlexLoRA has an aggregation of its own"),
        ({"algorithm": RoLoRA()}, MODE + "RoLoRA plans B in one round and A in the next"),
        ({"algorithm": FedKSeed()}, MODE + "FedKSeed has start_round"),
        ({"parts": [ProductError()]}, "ProductError compares .* leave it out"),
    ],
)
def test_what_does_not_go_with_buffered_rounds_is_refused(settings, complaint, tmp_path):
    fleet = make_fleet(tmp_path, buffered=settings.pop("buffered", FedBuff(2)), phone={})
    with refusal(complaint):
        rounds_of(1, **settings, fleet=fleet)


def test_an_algorithm_of_ones_own_is_refused_by_its_hooks_alone(tmp_path):
    class Counting(FedAvg):
        def finish_round(self, movement):
            return movement

    class Named(FedAvg):
        def send(self, visit, client, state):
            return state

    more = {"fleet": make_fleet(tmp_path, buffered=FedBuff(2), phone={})}
    with refusal("Counting has finish_round"):
        rounds_of(1, algorithm=Counting(), **more)
    for algorithm in (Named(), LocalOnly()):
        _, _, loop, _ = rounds_of(2, algorithm=algorithm, **more)
        assert loop.rounds_done == 2


def test_a_schedule_of_accumulation_is_refused(tmp_path):
    loop = FederatedLoop(clients_per_round=3, fleet=make_fleet(tmp_path, buffered=FedBuff(2), phone={}))
    callbacks = [loop, GradientAccumulationScheduler({0: 1, 2: 2})]
    with refusal(r"GradientAccumulationScheduler .* set trainer.accumulate_grad_batches"):
        trainer(2, callbacks).fit(module(), FederatedWrapper(Numbers(), ten_clients))


def test_parameters_that_join_while_clients_are_at_work_are_refused(tmp_path):
    """A head that is thawed in the third round, which nobody has received who was asked before."""

    class Thaw(L.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 2:
                trainer.optimizers[0].add_param_group({"params": pl_module.net[3].parameters()})

    class Frozen(Regression):
        def configure_optimizers(self):
            return torch.optim.SGD(self.net[0].parameters(), lr=0.05)

    fleet = make_fleet(tmp_path, buffered=FedBuff(2), quick={}, slow={"upload_mbps": 5})
    loop = FederatedLoop(clients_per_round=4, local_steps=2, fleet=fleet)
    with refusal(r"joined or left the optimizer"):
        trainer(6, [loop, Thaw()]).fit(Frozen(), FederatedWrapper(Numbers(), ten_clients))
    mode = Buffered(FedBuff(1), 1, 0)
    mode._step = ServerStep(2, 0.0, 1.0, (), (), ())
    one, both = {"w": torch.zeros(1)}, {"w": torch.zeros(1), "v": torch.zeros(1)}
    mode._models = {0: one}
    assert mode.model_for(Visit("a", 1, asked=0), dict(one)) is one
    assert mode.model_for(Visit("a", 1, asked=2), both) is both
    with refusal(MODE + "v and 0 others joined or left .* since client a was asked"):
        mode.model_for(Visit("a", 1, asked=0), both)


def test_concurrency_stands_for_clients_per_round(tmp_path):
    """Six at work though a round of the synchronous mode would have three."""
    fleet = make_fleet(tmp_path, buffered=FedBuff(1, concurrency=6), phone={})
    rows, *_ = rounds_of(6, fleet=fleet, clients_per_round=3)
    assert [row["asked_round"] for row in rows][:2] == [0, 0]
    assert len({row["client"] for row in rows if row["asked_round"] == 0}) >= 5
