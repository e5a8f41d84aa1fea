import logging

import pytest
import torch
from architectures import GPT2
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from refusals import refusal
from tiny_world import make_encoder, make_model
from torch import nn
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from fedlight import Lora, SelectorModule
from fedlight.devices.memory import resting_footprint
from fedlight.devices.quantization import HEADS, QuantizedBase, quantizable_layers
from fedlight.modules.language import base_model

FORMS = {8: "int8", 4: "nf4"}


def load(model, **settings):
    """A selector whose adapter counts."""
    module = SelectorModule(model, **{"dtype": "fp32", "lora": Lora(dropout=0.0), **settings})
    module.configure_model()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in module.state_dict().values():
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
    return module


@pytest.fixture(scope="module")
def plain(tiny_model):
    return load(tiny_model)


def make_batch(n=4):
    ids = torch.randint(5, 50, (n, 12), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(n) % 2}


def step(module, batch):
    """Losses and gradients of a training step, and logits of an evaluation."""
    module.zero_grad()
    losses = module.train().example_losses(batch)
    losses.mean().backward()
    gradients = [weight.grad.clone() for weight in module.parameters() if weight.grad is not None]
    with torch.no_grad():
        return [losses.detach(), *gradients, module.eval().choice_logits(batch)]


def equal(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


def mixed():
    """Two frozen linear layers, of which the second has no bias, under a trained one."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(96, 128), nn.Tanh(), nn.Linear(128, 64, bias=False)).requires_grad_(False)
    return nn.ModuleDict({"body": body, "top": nn.Linear(64, 2)})


def run(module, inputs):
    return module["top"](module["body"](inputs))


@pytest.fixture(scope="module")
def gpt2(tiny_model, tmp_path_factory):
    """A GPT-2, whose linear layers are of the class ``Conv1D``, with the tokenizer of the tiny model."""
    folder, tokenizer = tmp_path_factory.mktemp("gpt2"), AutoTokenizer.from_pretrained(tiny_model)
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(**{**GPT2, "vocab_size": len(tokenizer)})).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("model", "layers"), [("tiny_model", 2 * 7), ("gpt2", 2 * 4)])
def test_it_is_the_base_that_transformers_loads(model, layers, bits, request):
    """Layer by layer: which are quantized, to what, and what comes of it, in training and in evaluation."""
    folder = request.getfixturevalue(model)
    plain, loaded = load(folder), load(folder, base=FORMS[bits])
    kind = Linear8bitLt if bits == 8 else Linear4bit
    theirs = {name: layer for name, layer in loaded.named_modules() if isinstance(layer, kind)}
    assert set(quantizable_layers(plain)) == set(theirs)
    assert len(theirs) == layers
    if bits == 8:
        rows = sum(layer.out_features for layer in theirs.values())
        held = sum(weight.nbytes for weight in loaded.parameters() if not weight.requires_grad)
        assert resting_footprint(plain, 8, 0, number_bytes=4).base_bytes == held + 4 * rows
    base = QuantizedBase(plain)
    base.use(bits)
    ours, expected = step(plain, make_batch()), step(loaded, make_batch())
    base.use(16)
    assert equal(ours, expected)
    assert not equal(ours, step(plain, make_batch()))


@pytest.mark.parametrize("bits", [8, 4])
def test_the_weights_of_a_base_in_bf16_are_those_of_bitsandbytes(tiny_model, bits):
    """Unit vectors read them back."""
    module, reference = load(tiny_model, dtype="bf16"), load(tiny_model, dtype="bf16", base=FORMS[bits])
    QuantizedBase(module).use(bits)
    for name, layer in quantizable_layers(module).items():
        unit = torch.eye(layer.in_features, dtype=layer.weight.dtype)
        assert torch.equal(layer(unit), reference.get_submodule(name)(unit))
        assert layer(unit).dtype == layer.weight.dtype


def test_going_back_leaves_no_trace(plain):
    batch, base = make_batch(), QuantizedBase(plain)
    before = step(plain, batch)
    objects = {name: (id(part), *vars(part)) for name, part in plain.named_modules()}
    parameters = {name: (id(p), p.data_ptr(), p._version) for name, p in plain.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=0.0)
    for bits in (4, 8, 4, 16):
        base.use(bits)
        assert base.bits == bits
        plain.example_losses(batch).mean().backward()
        optimizer.step()
        assert {name: (id(p), p.data_ptr()) for name, p in plain.named_parameters()} == {
            name: entry[:2] for name, entry in parameters.items()
        }
    assert equal(step(plain, batch), before)
    assert {name: (id(part), *vars(part)) for name, part in plain.named_modules()} == objects
    frozen = {name for name, p in plain.named_parameters() if not p.requires_grad}
    now = {name: (id(p), p.data_ptr(), p._version) for name, p in plain.named_parameters()}
    assert all(now[name] == parameters[name] for name in frozen)


def test_one_copy_per_precision_which_no_switch_makes_again(plain):
    base = QuantizedBase(plain)
    for bits in (8, 4):
        base.use(bits)
    made = dict(base._twins)
    for bits in (8, 4, 16) * 2:
        base.use(bits)
    assert base._twins.keys() == made.keys()
    assert all(base._twins[key] is made[key] for key in made)
    assert len(made) == 2 * 14


@pytest.mark.parametrize("bits", [8, 4])
def test_any_module_with_frozen_layers(bits):
    """Its hooks and modes stay, and its biases, which bitsandbytes casts to the type of the inputs, in place."""
    module, inputs, calls = mixed(), torch.randn(8, 96), []
    module["body"][0].register_forward_hook(lambda *_: calls.append("hook"))
    assert list(quantizable_layers(module)) == ["body.0", "body.2"]
    exact, base = run(module, inputs), QuantizedBase(module)
    base.use(bits)
    rounded = run(module, inputs)
    assert calls == ["hook"] * 2
    error = (rounded - exact).norm() / exact.norm()
    assert 0 < error < {8: 0.02, 4: 0.2}[bits]
    rounded.sum().backward()  # passes through to what lies below and reaches what is trained
    assert module["top"].weight.grad.abs().sum() > 0
    assert module.state_dict().keys() == mixed().state_dict().keys()
    module.eval()["body"][0](inputs.bfloat16())
    assert module["body"][0].bias.dtype == torch.float32
    assert not module["body"][0].training
    base.use(16)
    assert torch.equal(run(module, inputs), exact)


@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_a_body_that_is_compiled_computes_in_each_precision_as_one_that_is_not():
    plain, compiled, inputs = mixed(), mixed(), torch.randn(2, 96)
    compiled["body"].compile(backend="eager")
    bases = [QuantizedBase(module) for module in (plain, compiled)]
    for bits in (16, 4, 8, 16, 4):
        for base in bases:
            base.use(bits)
        assert torch.equal(run(plain, inputs), run(compiled, inputs)), bits


@pytest.mark.parametrize("bits", [8, 4])
def test_weights_that_were_loaded_anew_are_quantized_anew(bits):
    module, inputs = mixed(), torch.randn(8, 96)
    base = QuantizedBase(module)
    base.use(bits)
    base.use(16)
    module.load_state_dict({name: 3 * value for name, value in module.state_dict().items()})
    base.use(bits)
    fresh = mixed()
    fresh.load_state_dict(module.state_dict())
    QuantizedBase(fresh).use(bits)
    assert torch.equal(run(module, inputs), run(fresh, inputs))


def test_what_stays_as_it_is(tmp_path, tmp_path_factory):
    """Heads, tied weights, adapters, and layers whose weight other code reads."""
    module = load(make_encoder(tmp_path), head="classifier")
    names = list(quantizable_layers(module))
    assert len(names) == 6 * 6
    assert not any("pooler" in name or "classifier" in name or "lora" in name for name in names)
    loaded = load(str(tmp_path), head="classifier", base="nf4")
    assert set(names) == {name for name, part in loaded.named_modules() if isinstance(part, Linear4bit)}

    tied = nn.ModuleDict({"embed": nn.Embedding(5, 4), "out": nn.Linear(4, 5, bias=False)})
    tied["out"].weight = tied["embed"].weight
    assert quantizable_layers(tied.requires_grad_(False)) == {}
    assert quantizable_layers(nn.MultiheadAttention(4, 2).requires_grad_(False)) == {}
    assert HEADS == base_model.HEADS
    untied = load(make_model(tmp_path_factory.mktemp("untied"), tie_word_embeddings=False))
    assert not any("lm_head" in name for name in quantizable_layers(untied))


@pytest.mark.parametrize(("bits", "others"), [(8, (16, 4)), (4, (16, 8))])
def test_a_base_that_is_quantized_already_serves_its_own_bits(tiny_model, bits, others):
    module = load(tiny_model, base=FORMS[bits])
    base = QuantizedBase(module)
    assert base.own_bits == bits
    before = step(module, make_batch())
    base.use(bits)
    assert equal(step(module, make_batch()), before)
    for other in others:
        with refusal(rf"weight_bits={other} does not go with base='{FORMS[bits]}', .* weight_bits: {bits}"):
            base.use(other)


def test_refusals():
    trained = nn.Linear(4, 4)
    base = QuantizedBase(trained)
    base.use(16)
    with refusal(r"weight_bits=8 needs frozen nn\.Linear layers to quantize, and the mod"):
        base.use(8)
    with refusal("weight_bits=2 must be 16, 8 or 4"):
        base.use(2)
    module = mixed()
    base = QuantizedBase(module)
    module["body"][2].requires_grad_(True)
    with refusal(r"weight_bits=4: body\.2 is trained by now"):
        base.use(4)
    QuantizedBase(mixed().double()).check(8)
    with refusal(r"weight_bits=4: body\.0 is in 64 bits, .*: set trainer\.precision to 32-true"):
        QuantizedBase(mixed().double()).check(4)


def test_int8_is_quiet(plain, caplog):
    logging.getLogger("bitsandbytes.autograd._functions").filters.clear()  # an int8 base sets the same one
    QuantizedBase(plain).use(8)
    with caplog.at_level(logging.WARNING), torch.no_grad():
        plain.eval().choice_logits(make_batch())
    QuantizedBase(plain).use(16)
    assert "inputs will be cast" not in caplog.text
