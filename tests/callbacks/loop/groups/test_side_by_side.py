import copy
from functools import partial

import pytest
import torch
from plain_lightning import assert_equal
from stacked import Lora, Points, both_ways, fit, furthest

from fedlight import CoordinateMedian, Ditto, FedAdam, FedAvg, FedProx, LocalOnly, Quantize, Scaffold, Wire
from fedlight.callbacks.loop.groups.side_by_side import clip_by_client
from fedlight.callbacks.loop.parts import StepSchedules
from fedlight.federation.algorithms import FedRep, GlobalThenLocal
from fedlight.federation.algorithms.lora import FedSALoRA, FFALoRA, FlexLoRA, HetLoRA, ProductAverage, RoLoRA

ALGORITHMS = {
    "FedAvg": {"algorithm": FedAvg()},
    "FedProx": {"algorithm": FedProx(0.5)},
    "Scaffold": {"algorithm": Scaffold()},
    "FedAdam": {"algorithm": FedAvg("uniform"), "server": FedAdam(0.1)},
    "median": {"aggregation": CoordinateMedian()},
    "wire": {"channel": Wire(up=[Quantize("int8")])},
    "Ditto": {"algorithm": Ditto(0.5, personal_epochs=2)},
    "FedRep": {"algorithm": FedRep(private=["lora_B"])},
    "FedPer": {"algorithm": FedRep(private=["lora_B"], together=True)},
    "GlobalThenLocal": {"algorithm": GlobalThenLocal(2)},
    "FFALoRA": {"algorithm": FFALoRA()},
    "RoLoRA": {"algorithm": RoLoRA()},
    "FedSALoRA": {"algorithm": FedSALoRA()},
    "ProductAverage": {"algorithm": ProductAverage()},
    "threshold": {"algorithm": ProductAverage(0.9)},
    "HetLoRA": {"algorithm": HetLoRA(ranks={"a": 1})},
    "FlexLoRA": {"algorithm": FlexLoRA(ranks={"a": 1})},
}
GROUPS = {2: [["a", "b"], ["c", "d"]], 3: [["a", "b", "c"], ["d"]], 4: [["a", "b", "c", "d"]]}


@pytest.mark.parametrize("at_once", GROUPS)
def test_clients_side_by_side_train_what_each_trains_alone(at_once):
    """Client c has 3 examples in a batch, the others 4."""
    (alone, _, groups, _), (_, _, others, _) = both_ways(Lora, at_once=at_once, tolerance=1e-6)
    assert groups == [[[name] for name in "abcd"]] * 2
    assert others == [GROUPS[at_once]] * 2
    start = {name: p for name, p in Lora().named_parameters() if p.requires_grad}
    assert furthest(start, alone) > 0.05


def test_in_fp64_the_uploads_are_the_same_bits():
    """Uploads are rounded to fp32, which swallows the rounding of fp64."""
    kind = {"dtype": torch.float64}
    alone, beside = both_ways(partial(Lora, **kind), partial(Points, **kind), tolerance=1e-12)
    assert_equal(beside[0], alone[0])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_under_sgd(name):
    # A quantizer rounds to one of 256 steps, and rounding may move a number to the next.
    most, tolerance = (2e-3, 1e-2) if name == "wire" else (1e-5, 1e-5)
    both_ways(Lora, most=most, tolerance=tolerance, rounds=3, **ALGORITHMS[name])


OPTIMIZERS = {
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "AdamW": {"fused": True},
    "Adam": {"amsgrad": True},
    "NAdam": {},
    "RAdam": {},
    "Adamax": {},
    "Adagrad": {},
    "Adadelta": {"rho": 0.5},
    "RMSprop": {"centered": True},
    "Rprop": {},
    "ASGD": {},
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_elementwise_optimizer(optimizer):
    made = partial(Lora, optimizer=optimizer, lr=0.02, **OPTIMIZERS[optimizer])
    most = 1e-5 if optimizer in ("SGD", "ASGD") else 1e-4
    both_ways(made, at_once=4, most=most, rounds=1, local_steps=7)


@pytest.mark.parametrize("kind", ["norm", "value"])
@pytest.mark.parametrize("algorithm", ["FedAvg", "FedProx"])
def test_gradients_are_clipped_by_client(kind, algorithm):
    clip = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": kind}
    free, *_ = fit(Lora(), Points(), **copy.deepcopy(ALGORITHMS[algorithm]))
    alone, _ = both_ways(Lora, settings=clip, **ALGORITHMS[algorithm])
    assert furthest(alone[0], free) > 0.01


def test_the_norm_of_each_client_is_that_of_torch():
    """A client whose gradient is not finite makes no other's so."""
    torch.manual_seed(0)
    parts = [torch.randn(3, 4, 5), torch.randn(3, 7)]
    parts[0][1, 0, 0] = torch.nan
    expected = [[part[k].clone() for part in parts] for k in range(3)]
    for own in expected:
        held = [torch.nn.Parameter(torch.zeros_like(part)) for part in own]
        for parameter, part in zip(held, own, strict=True):
            parameter.grad = part
        torch.nn.utils.clip_grad_norm_(held, 2.0)
    clip_by_client(parts, 2.0)
    for k in (0, 2):
        for part, own in zip(parts, expected[k], strict=True):
            torch.testing.assert_close(part[k], own[...], rtol=1e-6, atol=1e-7)
    assert all(part[1].isnan().all() for part in parts)


def test_batches_are_accumulated():
    _, (_, rows, *_) = both_ways(Lora, settings={"accumulate_grad_batches": 2})
    assert {row["steps"] for row in rows} == {3}


@pytest.mark.parametrize("after_round", ["continue", "restart"])
def test_schedules_step_by_the_steps_of_a_visit(after_round):
    class Scheduled(Lora):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    both_ways(Scheduled, parts=[StepSchedules(after_round)])


KEEPERS = {
    "LocalOnly": LocalOnly(),
    "Ditto": Ditto(0.5),
    "FedRep": FedRep(private=["lora_B"]),
    "GlobalThenLocal": GlobalThenLocal(1),
    "FedSALoRA": FedSALoRA(),
}


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("name", KEEPERS)
def test_clients_keep_their_own_models(name, optimizer):
    lr, most = (0.1, 1e-6) if optimizer == "SGD" else (0.02, 1e-5)
    made = partial(Lora, optimizer, lr=lr)
    runs = both_ways(made, most=1e-4, tolerance=1e-4, algorithm=KEEPERS[name])
    alone, beside = ({name: loop.own_state(name) for name in loop.clients} for *_, loop in runs)
    assert max(furthest(alone[name], beside[name]) for name in "abcd") < most
    assert furthest(alone["a"], alone["b"]) > 1e-2


def test_visits_of_unlike_length_are_trained_with_their_like():
    clients = {"a": 8, "b": 12, "c": 8, "d": 12}
    _, (_, _, groups, _) = both_ways(Lora, partial(Points, clients), 4, local_steps=None)
    assert groups[0] == [["a", "c"], ["b", "d"]]


def test_batches_that_workers_load():
    both_ways(Lora, partial(Points, num_workers=1))


def test_a_module_that_keeps_its_last_loss():
    """The loss holds autograd's nodes of the parameters in their shapes of then."""

    class Keeps(Lora):
        def example_losses(self, batch):
            self.last = super().example_losses(batch)
            return self.last

    alone, *_ = fit(Lora(), Points())
    beside, *_ = fit(Keeps(), Points(), 3)
    assert furthest(beside, alone) < 1e-6
