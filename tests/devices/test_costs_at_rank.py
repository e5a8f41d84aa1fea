import pytest
from ranked import Ranked
from stacked import Points

from fedlight import Lora, SelectorModule, SFTModule
from fedlight.devices import BatchShape, CostMeter
from fedlight.devices.memory import resting_footprint

SHAPES = {SFTModule: BatchShape(3, 20, responses=21), SelectorModule: BatchShape(3, 20)}


@pytest.mark.slow  # counts many models
@pytest.mark.parametrize(
    ("kind", "checkpointing"), [(SFTModule, False), (SFTModule, True), (SelectorModule, False)]
)
def test_of_a_language_model(kind, checkpointing, tiny_model):
    whole, shape = kind(tiny_model, lora=Lora(rank=6)), SHAPES[kind]
    costs = {}
    for rank in (1, 6):
        meter, own = CostMeter(whole, lora_rank=rank), CostMeter(kind(tiny_model, lora=Lora(rank=rank)))
        costs[rank] = meter.cost(shape, checkpointing)
        assert costs[rank] == own.cost(shape, checkpointing)
        for bits in (16, 4):
            at_rest = resting_footprint(meter.module, bits, 8)
            assert at_rest == resting_footprint(own.module, bits, 8)
    assert costs[6] == CostMeter(whole).cost(shape, checkpointing)
    assert costs[1].flops < costs[6].flops
    assert costs[1].activation_bytes < costs[6].activation_bytes


def test_of_a_module_of_ones_own_which_stays_as_it_is():
    data = Points()
    data.setup()

    def batch(examples):
        return data.collate(range(examples))

    whole = Ranked(rank=4)
    before = {name: (p, p.shape) for name, p in whole.named_parameters()}
    for rank in (1, 3, 4):
        meter, own = CostMeter(whole, batch, lora_rank=rank), CostMeter(Ranked(rank=rank), batch)
        assert meter.cost(BatchShape(5)) == own.cost(BatchShape(5))
        assert resting_footprint(meter.module, 16, 8) == resting_footprint(own.module, 16, 8)
    assert {name: (p, p.shape) for name, p in whole.named_parameters()}.keys() == before.keys()
    assert all(p is before[name][0] for name, p in whole.named_parameters())


class ByValue(Ranked):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() > 0 else 2 * loss


class OnTheObject(Ranked):
    def __init__(self, **options):
        super().__init__(**options)
        self.training_step = lambda batch, batch_idx: self.example_losses(batch).mean()


@pytest.mark.parametrize(
    ("kind", "why"), [(ByValue, "without values there is a"), (OnTheObject, "its training_step was set on")]
)
def test_a_step_that_shapes_do_not_tell_is_refused_at_a_rank_of_its_own(kind, why):
    data = Points()
    data.setup()
    module = kind()
    assert CostMeter(module, lambda n: data.collate(range(n))).cost(BatchShape(2)).flops > 0
    meter = CostMeter(module, lambda n: data.collate(range(n)), lora_rank=1)
    with pytest.raises(ValueError, match=rf"ranks: .* {kind.__name__} costs at rank 1 .*{why}"):
        meter.cost(BatchShape(2))
