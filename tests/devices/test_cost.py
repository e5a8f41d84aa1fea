import pytest
import torch
from lightning import LightningModule
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from fedlight import DPOModule, RewardModule, SelectorModule, SFTModule
from fedlight.devices import BatchShape
from fedlight.devices.cost import Checkpointed, CostMeter, Sketched, without_weights
from fedlight.devices.shape_run import ShapeRun

RANK = 8
LAYER = [(96, 128)] * 3 + [(128, 96), (96, 192), (96, 192), (192, 96)]
"""Linear layers q, k, v, o, gate, up and down: (in, out)."""


def flops_by_hand(examples, tokens, head_rows, head_positions):
    """Of the toy model: 4 layers, hidden 96, 4 heads of 32; adapters of rank 8 on all linear layers, frozen base."""
    n = examples * tokens
    base = sum(2 * n * i * o for i, o in LAYER)
    lora = sum(2 * n * RANK * (i + o) for i, o in LAYER)
    attention = 2 * 2 * examples * tokens**2 * 128  # scores, and their product with the values
    forward = 4 * (base + lora + attention)
    # A frozen layer's input gets a gradient, an adapter's input and weights do; attention computes its scores again.
    backward = 4 * (base + 2 * lora + attention * 5 // 2)
    # Nothing before the first layer is trained: its q, k and v need no gradient of their input.
    backward -= sum(2 * n * i * o + 2 * n * RANK * i for i, o in LAYER[:3])
    head = 2 * 2 * head_positions * 96 * head_rows  # forward, and the gradient of its input
    return forward + backward + head


def by_hand(flops):
    """Some releases of transformers also multiply positions by rotary frequencies, a hundred thousandth of the whole."""
    return pytest.approx(flops, rel=2e-5)


REFERENCE = 4 * (sum(2 * 240 * i * o for i, o in LAYER) + 4 * 6 * 40**2 * 128) + 2 * 70 * 96 * 97
"""FLOPs of a pass over 6 texts of 40 tokens with the head at 70 of them."""


@pytest.mark.parametrize(
    ("kind", "shape", "flops"),
    [
        (SelectorModule, BatchShape(4, 50), flops_by_hand(4, 50, 2, 4)),
        (SFTModule, BatchShape(3, 40, responses=70), flops_by_hand(3, 40, 97, 70)),
        (DPOModule, BatchShape(3, 40, responses=70), flops_by_hand(6, 40, 97, 70) + REFERENCE),
    ],
)
def test_flops_by_hand(kind, shape, flops, monkeypatch):
    """The head counts where there are labels; DPO has both responses and the reference's pass."""
    meter = CostMeter(kind("toy"))
    cost = meter.cost(shape)
    assert cost.flops == by_hand(flops)
    monkeypatch.setattr(meter, "_count", None)  # a shape is counted once
    assert meter.cost(shape) is cost


def test_checkpointing_computes_the_layers_once_more():
    meter, shape = CostMeter(SelectorModule("toy")), BatchShape(4, 50)
    kept, again = meter.cost(shape), meter.cost(shape, checkpointing=True)
    forward = 4 * (sum(2 * 200 * (i * o + RANK * (i + o)) for i, o in LAYER) + 4 * 4 * 50**2 * 128)
    # torch stops when the last tensor that is needed is there: before the last product of a layer, its adapter's B.
    assert again.flops - kept.flops == pytest.approx(forward, rel=0.03)
    assert again.flops - kept.flops <= forward
    assert again.activation_bytes < 0.5 * kept.activation_bytes


def test_flops_are_those_of_torch_on_a_real_step():
    module = RewardModule("toy", dtype="fp32")
    module.configure_model()
    batch = module.sketch_batch(BatchShape(2, 30))
    with FlopCounterMode(display=False) as counter:
        module.example_losses(batch).mean().backward()
    # Before torch 2.15 its counter does not know attention on a CPU: 7 products of scores in 4 layers.
    is_known = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu in flop_registry
    attention = 0 if is_known else 4 * 7 * 2 * 4 * 30**2 * 128
    assert CostMeter(module).cost(BatchShape(2, 30)).flops == counter.get_total_flops() + attention


@pytest.mark.parametrize("kind", [SelectorModule, SFTModule, DPOModule, RewardModule])
def test_the_cost_is_a_function_of_the_shape_alone(kind):
    shapes = [BatchShape(4, 16, 8), BatchShape(2, 24, 23)]
    module = kind("toy")
    one, other = CostMeter(module), CostMeter(module)
    state = torch.get_rng_state()
    costs = [one.cost(shape) for shape in shapes]
    assert torch.equal(torch.get_rng_state(), state)
    assert module.network is None  # nothing was loaded
    other.cost(shapes[1], checkpointing=True)
    assert [other.cost(shape) for shape in reversed(shapes)] == costs[::-1]


ON_META = []  # of each step of a Net: was it a copy that took it?


class Net(LightningModule):
    """What people bring: its own step, logging, dropout, batch norm, dict outputs."""

    def __init__(self, looks_at_values=False):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 50), nn.BatchNorm1d(50), nn.Dropout(0.5), nn.Linear(50, 1))
        self.looks_at_values = looks_at_values

    def training_step(self, batch, batch_idx):
        x, y = batch
        ON_META.append(self.body[0].weight.is_meta)
        out = self.body(x).squeeze(1)
        if self.looks_at_values and out.abs().max().item() < 0:
            raise AssertionError("never")
        loss = nn.functional.mse_loss(out, y)
        self.log("train/loss", loss)
        return {"loss": loss}


def pairs(examples):
    return [torch.randn(examples, 6), torch.randn(examples)]


@pytest.mark.parametrize("looks_at_values", [False, True])
def test_any_module_can_be_counted_and_stays_as_it_is(looks_at_values, monkeypatch):
    # Torch warns before it forks the streams of both.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    module = Net(looks_at_values).eval()
    module.body[0].weight.grad = grad = torch.ones(50, 6)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    ON_META.clear()
    meter = CostMeter(module, example_batch=pairs)
    cost = meter.cost(BatchShape(10))
    # Forward, gradients of the weights, and of the second layer's input.
    assert cost.flops == 2 * 10 * (6 * 50 + 50) * 2 + 2 * 10 * 50
    assert 4 * 10 * 50 * 3 < cost.activation_bytes < 4 * 10 * 50 * 8
    assert meter.cost(BatchShape(20)).flops == 2 * cost.flops
    assert torch.equal(torch.get_rng_state(), state)
    on_meta = [*ON_META]
    other = CostMeter(Net(not looks_at_values), pairs).cost(BatchShape(10))  # counted in the other way
    assert cost.activation_bytes == pytest.approx(other.activation_bytes, rel=0.02)
    assert not module.training
    assert module.body[0].weight.grad is grad
    assert grad.eq(1).all()
    assert module.body[3].weight.grad is None
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert "log" not in vars(module)
    of_each_shape = [True, False] if looks_at_values else [True]
    assert of_each_shape * 2 == on_meta


def test_what_cannot_be_counted_is_refused():
    assert isinstance(SFTModule("toy"), Sketched)
    assert isinstance(SFTModule("toy"), Checkpointed)
    with pytest.raises(ValueError, match="Net has no skeleton: give CostMeter an example_batch"):
        CostMeter(Net())
    with pytest.raises(ValueError, match="Net has no checkpoint_gradients"):
        CostMeter(Net(), pairs).cost(BatchShape(2), checkpointing=True)
    for sizes in ((0,), (1, 4, -1)):
        with pytest.raises(ValueError, match="an example or more, and no negative number"):
            BatchShape(*sizes)
    with pytest.raises(ValueError, match="too many values to unpack"):  # as the step raises it
        CostMeter(Net(), lambda examples: (1, 2, 3)).cost(BatchShape(2))


def test_a_copy_without_weights_keeps_ties_and_drops_the_trainer():
    module = Net()
    module.tied = module.body[0]
    module._trainer = trainer = object()
    ghost = without_weights(module)
    assert ghost.tied.weight is ghost.body[0].weight
    assert ghost.body[0].weight.is_meta
    assert ghost._trainer is None
    assert module._trainer is trainer


def test_live_bytes_follow_births_and_deaths():
    x = torch.ones(10, device="meta")
    with ShapeRun([x]) as counted:
        a = x + 1  # 40
        b = a * 2  # 80
        del a
        view = b.view(2, 5)  # a view takes nothing
        c = torch.cat([b, b])  # 40 + 80
        del b
        view += 1
        del view, c
        torch.ones(29, device="meta") + 1  # two of 116
    assert counted.peak_bytes == 232
