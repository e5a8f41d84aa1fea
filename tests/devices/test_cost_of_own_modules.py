from collections import namedtuple

import torch
from lightning import LightningModule
from refusals import refusal
from torch import nn
from torchmetrics import SumMetric

from fedlight.devices.cost import CostMeter, _moved
from fedlight.devices.shape import BatchShape

Pair = namedtuple("Pair", "x y")
FLOPS = 2 * 5 * 3 * 1 * 2  # of five examples of three numbers: forward, and the gradient of the weights


class Line(LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.num_seen, self.norm = nn.Linear(3, 1), SumMetric(), nn.BatchNorm1d(3)

    def training_step(self, batch, batch_idx):
        self.num_seen.update(float(len(batch[0])))
        self.log("train/seen", self.num_seen)
        return nn.functional.mse_loss(self.net(self.norm(batch[0])), batch[1])


class Looks(Line):
    """Depends on values, so that it cannot be counted without."""

    def training_step(self, batch, batch_idx):
        assert self.net.weight.abs().sum().item() >= 0
        return super().training_step(batch, batch_idx)


def pair(examples):
    return Pair(torch.ones(examples, 3), torch.ones(examples, 1))


def flops(module, batch=pair):
    return CostMeter(module, batch).cost(BatchShape(5)).flops


def test_a_compiled_network_costs_the_same_whatever_it_has_computed_before():
    costs, module = [], Line()
    module.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    for compiled in (False, True):
        if compiled:
            module.net = torch.compile(module.net, backend="eager")
            module.net(torch.ones(5, 3))
        costs.append(CostMeter(module, pair).cost(BatchShape(5)))
    assert costs[0] == costs[1]


def test_metrics_do_not_see_the_batch_that_is_counted(caplog):
    module = Looks()
    module.num_seen.update(2.0)
    with caplog.at_level("INFO", logger="fedlight"):
        assert flops(module) == FLOPS + 2 * 5 * 3  # and the gradient of what it normalised
    assert "Looks is measured by a real step" in caplog.text
    assert module.num_seen.compute() == 2
    assert module.num_seen.update_count == 1


def test_a_step_that_optimizes_by_itself_is_refused_and_not_run():
    module, made = Line(), []
    module.automatic_optimization = False
    with refusal(r"automatic_optimization=False of Line: .* set it to True and return the"):
        CostMeter(module, lambda examples: made.append(examples))
    assert not made


def test_a_step_may_do_without_the_number_of_the_batch():
    class Short(Line):
        def training_step(self, batch):
            return super().training_step(batch, 7)

    class ShortLooks(Looks):
        def training_step(self, batch):
            return super().training_step(batch, 7)

    class Any(Line):
        def training_step(self, *args):
            batch, batch_idx = args
            assert batch_idx == 0
            return super().training_step(batch, batch_idx)

    assert flops(Short()) == flops(ShortLooks()) == flops(Any()) == flops(Line())


def test_batches_of_a_tokenizer_reach_the_step_as_they_are():
    from transformers import BatchEncoding

    class Named(Looks):
        def training_step(self, batch, batch_idx):
            assert type(batch) is BatchEncoding
            return super().training_step((batch["x"], batch["y"]), batch_idx)

    assert flops(Named(), lambda n: BatchEncoding(pair(n)._asdict())) == flops(Line())


def test_batches_are_moved_in_any_nesting():
    from transformers import BatchEncoding

    batch = BatchEncoding({"pair": pair(2), "rows": [(torch.ones(2), "text")]})
    moved = _moved(batch, torch.device("meta"))
    assert type(moved) is BatchEncoding
    assert type(moved["pair"]) is Pair
    assert moved["pair"].x.is_meta
    assert moved["rows"][0][0].is_meta
    assert moved["rows"][0][1] == "text"


def test_a_step_and_a_log_of_its_own_stay_on_the_object():
    module = Line()
    original, logged = module.training_step, []

    def step(batch, batch_idx):
        return original(batch, batch_idx)

    def log(*args, **kwargs):
        logged.append(args)

    module.training_step, module.log = step, log
    module.num_seen.update(2.0)
    assert flops(module) == flops(Line())
    assert module.training_step is step
    assert module.log is log
    assert not logged
    # The step holds on to the module and not to a copy of it; still nothing is left behind.
    assert module.num_seen.compute() == 2
    assert module.norm.num_batches_tracked == 0
    assert all(weight.grad is None for weight in module.parameters())
