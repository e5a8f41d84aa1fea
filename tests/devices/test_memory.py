from types import SimpleNamespace

import pytest
import torch
from tiny_world import make_encoder, make_model
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fedlight import Algorithm, Client, DPOModule, RewardModule, SelectorModule, SFTModule, Visit, Visiting
from fedlight.callbacks.loop.forward.forward_steps import ForwardClient, ForwardSteps
from fedlight.conf import path
from fedlight.devices import BatchShape, CostMeter, StepCost
from fedlight.devices.memory import (
    Fit,
    Footprint,
    fit,
    forward_only,
    moment_bytes_per_weight,
    parts,
    resting_footprint,
    visit_flops,
)
from fedlight.federation.forward import ZerothOrder
from fedlight.modules.language.adapters import Lora, trained_parameters
from fedlight.stacking.fast_layers import fuse_lora, use_fast_layers

EXAMPLES = 8
WAYS = ((EXAMPLES, False), (EXAMPLES // 4, False), (EXAMPLES, True))
"""Examples of a micro-batch, and whether layers are computed twice."""


def resized(folder, **sizes):
    """An untrained model of other sizes, in a folder that has a tokenizer."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    for name, value in sizes.items():
        setattr(config, name, value)
    kind = AutoModel if config.model_type == "bert" else AutoModelForCausalLM
    kind.from_config(config).save_pretrained(folder)
    return folder


def deep(folder):
    return SFTModule(resized(make_model(folder), num_hidden_layers=5, hidden_size=64, head_dim=32))


def wide(folder):
    """Grouped attention, and at the labelled tokens more logits than activations."""
    sizes = {"hidden_size": 96, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    return DPOModule(resized(make_model(folder), vocab_size=3000, head_dim=24, **sizes), lora=Lora(dropout=0))


def encoder(folder):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    return SelectorModule(resized(make_encoder(folder), **sizes), head="classifier")


def loaded(build, folder, dtype):
    """A module with weights in that number form, and the meter of another that has none."""
    module = build(folder)
    module.hparams.dtype = dtype
    skeleton = module.skeleton(dtype)
    if dtype == "bf16":  # on devices, whose base is quantized, the layers are PEFT's
        use_fast_layers(skeleton.network, skeleton.dropout_masks)
    meter = CostMeter(skeleton)
    module.configure_model()
    for weight in trained_parameters(module).values():
        weight.grad = torch.zeros_like(weight)
    return module, meter


@pytest.fixture(scope="module", params=[deep, wide, encoder], ids=lambda build: build.__name__)
def trained(request, tmp_path_factory):
    return loaded(request.param, tmp_path_factory.mktemp("model"), "fp32")


def real_batch(module, shape):
    """Texts of different lengths, the longest of ``shape.tokens``; labels at the end of each."""

    def side(responses):
        lengths = [max(2, shape.tokens - 2 * row) for row in range(shape.examples)]
        ids = torch.randint(5, 15, (shape.examples, shape.tokens))
        mask = (torch.arange(shape.tokens) < torch.tensor(lengths)[:, None]).long()
        labels = torch.full_like(ids, -100)
        for row, length in enumerate(lengths):
            labels[row, length - responses // shape.examples : length] = 7
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    if isinstance(module, DPOModule):
        return {"chosen": side(shape.responses // 2), "rejected": side(shape.responses // 2)}
    labels = {"labels": torch.ones(shape.examples).long()} if module.num_labels else {}
    return side(shape.responses) | labels


def rows(batch, begin, end):
    return {k: rows(v, begin, end) if isinstance(v, dict) else v[begin:end] for k, v in batch.items()}


def measured_peak(step):
    """Most bytes that the CPU's allocator had given out at once in a step, beyond those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def check_peaks(module, meter, tokens, micro_batch, checkpointing, within):
    shape = BatchShape(EXAMPLES, tokens, 0 if module.num_labels else 2 * EXAMPLES)
    predicted = max(meter.cost(part, checkpointing).activation_bytes for part in parts(shape, micro_batch))
    batch = real_batch(module, shape)

    def step():
        for begin in range(0, EXAMPLES, micro_batch):
            (module.example_losses(rows(batch, begin, begin + micro_batch)).sum() / EXAMPLES).backward()

    module.checkpoint_gradients(checkpointing)
    step()  # what is kept from the first step on, such as DPO's reference, is no activation
    peak = measured_peak(step)
    module.checkpoint_gradients(False)
    assert predicted == pytest.approx(peak, rel=within)
    return predicted


@pytest.mark.parametrize("tokens", [24, 48, 96])
def test_predicted_activations_are_those_of_the_allocator(trained, tokens):
    whole, in_parts, computed_twice = (check_peaks(*trained, tokens, *way, within=0.03) for way in WAYS)
    assert in_parts < 0.3 * whole
    assert computed_twice < 0.7 * whole


@pytest.mark.parametrize("build", [deep, encoder])
def test_predictions_for_a_base_in_16_bits(build, tmp_path):
    trained = loaded(build, tmp_path, "bf16")
    for way in WAYS:
        check_peaks(*trained, 32, *way, within=0.1)
    check_forward_peaks(*trained, 32, 1, within=0.1)


def forward_steps(module, perturbations):
    """Steps of a visit without gradients, as the loop makes them, and the bytes of what it trains."""
    own = trained_parameters(module)
    visiting = Visiting(Visit("a", 1), Client("a", 1, 1.0), {}, {})
    settings = {"gradient_clip_val": None, "gradient_clip_algorithm": None, "accumulate_grad_batches": 1}
    client = ForwardClient(visiting, own, own)
    zeroth_order = ZerothOrder(perturbations=perturbations)
    steps = ForwardSteps(zeroth_order, Algorithm(), [client], (0, 0), SimpleNamespace(**settings))
    return steps, sum(p.nbytes for p in own.values())


def check_forward_peaks(module, meter, tokens, perturbations, within):
    """The copy of the adapter and the activations of a pass; of inference alone, the activations."""
    shape = BatchShape(EXAMPLES, tokens, 0 if module.num_labels else 2 * EXAMPLES)
    predicted, batch = meter.forward_cost(shape).activation_bytes, real_batch(module, shape)

    def as_new():  # of new pairs DPO takes the reference's log-probabilities in the first pass
        getattr(module, "_reference", {}).clear()

    @torch.no_grad()
    def inference():
        as_new()
        module.example_losses(batch).mean()

    inference()
    alone = measured_peak(inference)
    module.sum_training()
    steps, copied = forward_steps(module, perturbations)
    optimizer = torch.optim.SGD(trained_parameters(module).values(), lr=1e-3)
    steps.enter(module)
    module.training_step(batch, 0)
    steps.step(optimizer)
    as_new()
    peak = measured_peak(lambda: module.training_step(batch, 0))
    stepping = measured_peak(lambda: steps.step(optimizer))
    steps.leave()
    assert alone == pytest.approx(predicted, rel=within)
    assert peak == pytest.approx(copied + predicted, rel=within)
    assert stepping < predicted
    backward = meter.cost(shape).activation_bytes
    assert peak < 0.8 * backward
    return peak


@pytest.mark.parametrize("tokens", [24, 96])
def test_predicted_memory_of_forward_passes_alone_is_that_of_the_allocator(trained, tokens):
    module, _ = trained
    skeleton = module.skeleton("fp32")
    fuse_lora(skeleton.network)  # as on a loaded base
    one = check_forward_peaks(module, CostMeter(skeleton), tokens, 1, within=0.05)
    several = check_forward_peaks(module, CostMeter(skeleton), tokens, 3, within=0.05)
    assert several == pytest.approx(one, rel=0.01)


def test_a_forward_only_visit_takes_hardly_more_than_inference():
    """Of the shape of Qwen2-0.5B: 24 layers, 8 texts of 128 tokens; backpropagation takes several times as much."""
    module = SFTModule(str(path("shapes/qwen2_0.5b")), lora=Lora(rank=16))
    meter, shape = CostMeter(module), BatchShape(8, 128, 8 * 64)
    resting = resting_footprint(meter.module, 16, 8)
    found = {way: fit([shape], meter, 2**50, resting, way).footprint for way in ("backprop", "forward")}
    inference = resting.base_bytes + resting.adapter_bytes + meter.forward_cost(shape).activation_bytes
    assert inference < found["forward"].peak_bytes < 1.1 * inference
    assert found["backprop"].peak_bytes > 1.9 * found["forward"].peak_bytes


class Priced:
    """A meter with a price list: 100 bytes and 10 FLOPs for each example, with checkpointing 30 bytes and 13 FLOPs.

    A forward pass takes 5 bytes and 3 FLOPs for each example.
    """

    checkpoints, together = True, 1

    def cost(self, shape, checkpointing=False):
        flops, size = (13, 30) if checkpointing else (10, 100)
        return StepCost(flops * shape.examples, size * shape.examples + shape.tokens)

    def forward_cost(self, shape):
        return StepCost(3 * shape.examples, 5 * shape.examples + shape.tokens)


SHAPES = [BatchShape(8, 5), BatchShape(8, 7), BatchShape(3, 7)]


RESTING = Footprint(10, 4, 6, 20)  # 18 without gradients and moments, and with a second adapter


@pytest.mark.parametrize(
    ("train", "budget", "micro_batch", "checkpointing", "forward", "fits"),
    [
        ("backprop", 847, 8, False, False, True),  # 40 at rest, 8 * 100 + 7
        ("backprop", 846, 4, False, False, True),
        ("backprop", 147, 1, False, False, True),
        ("backprop", 146, 2, True, False, True),  # with 8 at a time 287, with 4 still 167
        ("backprop", 107, 2, True, False, True),
        ("backprop", 106, 1, True, False, True),
        ("backprop", 77, 1, True, False, True),
        ("backprop", 76, 1, True, False, False),
        ("auto", 847, 8, False, False, True),
        ("auto", 77, 1, True, False, True),  # 40 + 30 + 7
        ("auto", 76, 8, False, True, True),  # 18 + 8 * 5 + 7
        ("auto", 64, 4, False, True, True),
        ("auto", 30, 1, False, True, True),
        ("auto", 29, 1, False, True, False),
        ("forward", 847, 8, False, True, True),
        ("forward", 64, 4, False, True, True),
    ],
)
def test_the_first_way_that_fits_is_taken_to_the_byte_and_forward_passes_alone_come_last(
    train, budget, micro_batch, checkpointing, forward, fits
):
    found = fit(SHAPES, Priced(), budget, RESTING, train)
    expected = (micro_batch, checkpointing, forward, fits)
    assert (found.micro_batch, found.checkpointing, found.forward, found.fits) == expected
    assert (found.footprint.gradient_bytes, found.footprint.adapter_bytes) == ((0, 8) if forward else (6, 4))
    assert found.footprint.peak_bytes == found.footprint.activation_bytes + (18 if forward else 40)


def test_a_module_without_checkpointing_is_only_split():
    meter = Priced()
    meter.checkpoints = False
    found = fit(SHAPES, meter, 100, Footprint(0, 0, 0, 0))
    assert (found.micro_batch, found.checkpointing, found.fits) == (1, False, False)
    assert found.footprint.activation_bytes == 107


@pytest.mark.parametrize(("budget", "micro_batch", "fits"), [(407, 4, True), (406, 2, True), (206, 2, False)])
def test_examples_that_are_computed_together_are_not_parted(budget, micro_batch, fits):
    meter = Priced()
    meter.checkpoints, meter.together = False, 2
    found = fit([BatchShape(6, 7)], meter, budget, Footprint(0, 0, 0, 0))
    assert (found.micro_batch, found.fits) == (micro_batch, fits)


def test_flops_of_a_visit_are_of_the_parts_that_are_computed():
    class ByLength(Priced):
        def cost(self, shape, checkpointing=False):  # 1,000 for each batch that is computed
            return StepCost(1000 + shape.examples * shape.tokens, 0)

    steps = [BatchShape(8, 5), BatchShape(8, 5), BatchShape(3, 7)]
    whole = Fit(8, False, Footprint(0, 0, 0, 0), True)
    assert visit_flops(steps, ByLength(), whole) == 3000 + 2 * 8 * 5 + 3 * 7
    in_twos = Fit(2, False, Footprint(0, 0, 0, 0), True)
    assert visit_flops(steps, ByLength(), in_twos) == (4 + 4 + 2) * 1000 + 2 * 8 * 5 + 3 * 7
    assert visit_flops(steps, Priced(), Fit(2, True, Footprint(0, 0, 0, 0), True)) == 13 * 19
    forward = Fit(2, False, Footprint(0, 0, 0, 0), True, forward=True)
    assert visit_flops(steps, Priced(), forward) == 2 * 3 * 19
    assert visit_flops(steps, Priced(), forward, perturbations=5) == 10 * 3 * 19


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_bytes_of_the_toy_model_by_hand(bits):
    """Hidden 96, inner 192, 4 heads of 32, 4 layers, 97 words, tied head; adapters of rank 8 on all linear layers."""
    attention, mlp = [(128, 96)] * 3 + [(96, 128)], [(192, 96)] * 2 + [(96, 192)]  # (rows, columns)
    linear = 4 * (attention + mlp)
    biases, norms = 4 * (3 * 128 + 96), 9 * 96
    base = 2 * (97 * 96 + biases + norms)
    for r, c in linear:
        base += {16: 2 * r * c, 8: r * c + 4 * r, 4: r * c // 2 + 4 * (r * c // 64)}[bits]
    adapter = 4 * sum(8 * (r + c) for r, c in linear)
    found = resting_footprint(SFTModule("toy").skeleton(), bits, 8.0)
    assert found == Footprint(base, adapter, adapter, 2 * adapter)
    assert found.peak_bytes == base + 4 * adapter


def test_only_what_a_visit_trains_is_on_the_device():
    three = SelectorModule("toy", num_adapters=3).skeleton()
    one = resting_footprint(SelectorModule("toy").skeleton(), 16, 8.0)
    assert resting_footprint(three, 16, 8.0).adapter_bytes == 3 * one.adapter_bytes
    names = [name for name, _ in three.named_parameters() if "adapter1" in name]
    assert resting_footprint(three, 16, 8.0, names) == one
    headed = resting_footprint(RewardModule("toy").skeleton(), 16, 0.0)  # its head is trained as well
    adapter = resting_footprint(SFTModule("toy").skeleton(), 16, 0.0)
    assert (headed.adapter_bytes, headed.moment_bytes) == (adapter.adapter_bytes + 4 * 96, 0)


def test_what_requires_a_gradient_and_is_not_trained_rests_there_beside_its_gradient():
    frozen = nn.Linear(4, 2, bias=False).requires_grad_(False)
    module = nn.Sequential(frozen, nn.Linear(2, 3), nn.Linear(3, 5))
    trained = ["2.weight", "2.bias"]
    found = resting_footprint(module, 16, 8.0, trained)
    assert found == Footprint(2 * 8 + 4 * 9, 4 * 20, 4 * (20 + 9), 8 * 20)
    assert forward_only(found) == Footprint(2 * 8 + 4 * 9, 2 * 4 * 20, 0, 0)
    assert resting_footprint(module, 16, 8.0) == Footprint(2 * 8, 4 * 29, 4 * 29, 8 * 29)
    with pytest.raises(ValueError, match="weight_bits=3 must be 16, 8 or 4"):
        resting_footprint(module, 3, 8.0)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (torch.optim.AdamW, 8.0),
        (torch.optim.SGD, 0.0),
        (lambda weights: torch.optim.SGD(weights, momentum=0.9), 4.0),
        (torch.optim.RMSprop, 4.0),
        (lambda weights: torch.optim.RMSprop(weights, centered=True, momentum=0.9), 12.0),
        (lambda weights: torch.optim.Adam(weights, amsgrad=True), 12.0),
    ],
)
def test_moments_are_what_the_optimizer_really_keeps(make, expected):
    weight = nn.Parameter(torch.ones(3))
    optimizer = make([weight])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    assert moment_bytes_per_weight(optimizer) == expected
    assert not optimizer.state
    assert not calls
    assert torch.equal(weight, torch.ones(3))
    assert optimizer.param_groups[0]["params"] == [weight]
    weight.grad = torch.ones(3)
    optimizer.step()
    scheduler.step()  # would warn, had the sample counted as a step, or had the patched step been lost
    assert len(calls) == 1


def test_of_groups_that_differ_the_largest_counts_and_a_step_that_needs_a_closure_is_refused():
    plain, heavy = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    groups = [{"params": [plain]}, {"params": [heavy], "momentum": 0.9}]
    for given in (groups, groups[::-1]):
        assert moment_bytes_per_weight(torch.optim.SGD(given, lr=0.1)) == 4.0
    with pytest.raises(ValueError, match=r"optimizer LBFGS: its step needs a closure, .* AdamW or SGD"):
        moment_bytes_per_weight(torch.optim.LBFGS([plain]))
