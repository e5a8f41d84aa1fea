import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedlight.stacking.fast_layers import FusedLora, fuse_lora


def make_pair(alpha=16, dtype=torch.float32, **settings):
    """Return PEFT's model of two layers and its fused copy."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24)).to(dtype)
    config = LoraConfig(r=8, lora_alpha=alpha, target_modules=["0", "2"], init_lora_weights=False, **settings)
    plain = get_peft_model(network, config).train()
    fused = copy.deepcopy(plain)
    fuse_lora(fused)
    return plain, fused


def run(model, x):
    """Return the output and the gradients of input and adapters."""
    x = x.clone().requires_grad_(True)
    found = model(x)
    found.square().sum().backward()
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    return [found.detach(), x.grad, *gradients]


class Calls(TorchDispatchMode):
    """Names of the operations of a block."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [(24,), (7, 24), (3, 5, 24)])
def test_numbers_are_those_of_peft_to_the_last_bit(shape):
    plain, fused = make_pair()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    expected, found = run(plain, x), run(fused, x)
    assert len(found) == 2 + 4
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_another_scaling_differs_by_rounding_alone():
    plain, fused = make_pair(alpha=12.4)
    x = torch.randn(9, 24)
    torch.testing.assert_close(run(fused, x), run(plain, x), rtol=1e-5, atol=1e-5)


def test_product_scaling_and_sum_are_one_operation():
    plain, fused = make_pair()
    names = {}
    for key, model in (("plain", plain), ("fused", fused)):
        with Calls() as calls:
            model(torch.randn(9, 24))
        names[key] = calls.names
    assert [names["plain"].count(name) for name in ("mul", "add")] == [2, 2]
    assert [names["fused"].count(name) for name in ("mul", "add")] == [0, 0]
    products = ("mm", "addmm")
    assert sum(map(names["fused"].count, products)) == sum(map(names["plain"].count, products)) == 6


@pytest.mark.parametrize("settings", [{"lora_bias": True}, {"use_dora": True}, {"dtype": torch.float16}])
def test_other_adapters_are_left_to_peft(settings):
    plain, fused = make_pair(**settings)
    x = torch.randn(9, 24).to(settings.get("dtype", torch.float32))
    assert all(torch.equal(*pair) for pair in zip(run(fused, x), run(plain, x), strict=True))


@pytest.mark.parametrize(("rows", "dtype"), [(1, torch.float32), (64, torch.float32), (65, torch.bfloat16)])
def test_few_rows_without_gradients_have_products_in_the_type_of_the_adapter(rows, dtype):
    _, fused = make_pair(dtype=torch.bfloat16)
    layer, x = fused.base_model.model[0], torch.randn(rows, 24).bfloat16()
    a, b = (factor["default"].weight.to(dtype) for factor in (layer.lora_A, layer.lora_B))
    with torch.no_grad():
        expected = torch.addmm(layer.base_layer(x).to(dtype), x.to(dtype) @ a.t(), b.t(), alpha=2.0)
        assert torch.equal(layer(x), expected.bfloat16())
    in_bf16 = torch.addmm(layer.base_layer(x), x @ a.t().bfloat16(), b.t().bfloat16(), alpha=2.0)
    assert torch.equal(layer(x), in_bf16)


def test_under_a_base_in_bf16_errors_are_those_of_peft():
    plain, fused = make_pair(dtype=torch.bfloat16)
    exact, x = copy.deepcopy(plain).float(), torch.randn(64, 24).bfloat16()
    expected, theirs, found = run(exact, x.float()), run(plain, x), run(fused, x)
    for goal, their, own in zip(expected, theirs, found, strict=True):
        assert own.dtype == their.dtype
        errors = [float((value.float() - goal).norm() / goal.norm()) for value in (their, own)]
        assert 0 < errors[1] < max(1.1 * errors[0], 2**-7)  # PEFT's gradients of the adapter are not rounded
    with Calls() as calls:
        fused(x)
    assert calls.names.count("_to_copy") == 4  # of A and B


def test_states_of_peft_are_kept():
    plain, fused = make_pair()
    x = torch.randn(9, 24)
    adapted = plain(x)
    for model in (plain, fused):
        model.add_adapter("other", LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False))
    with plain.disable_adapter(), fused.disable_adapter():
        assert torch.equal(fused(x), plain(x))
        assert not torch.equal(fused(x), adapted)
    for model in (plain, fused):
        model.base_model.set_adapter(["default", "other"])
    fused.load_state_dict(plain.state_dict())
    assert torch.equal(fused(x), plain(x))
    for model in (plain, fused):
        model.set_adapter("default")
        model.merge_adapter()
    assert torch.equal(fused(x), plain(x))
    torch.testing.assert_close(fused(x), adapted, rtol=1e-4, atol=1e-4)
    for model in (plain, fused):
        model.unmerge_adapter()
    torch.testing.assert_close(fused(x), adapted, rtol=1e-4, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fused(x), plain(x))


def test_shapes_without_numbers_are_those_of_peft():
    """Lightning's `measure_flops` counts on the device meta, for which torch has no autocast."""
    for model in make_pair():
        model.to("meta")
        found = model(torch.randn(3, 5, 24, device="meta"))
        assert (found.shape, found.dtype) == ((3, 5, 24), torch.float32)


@pytest.mark.parametrize("role", ["lora_A", "lora_B"])
def test_hooks_of_the_adapter_are_called(role):
    _, fused = make_pair()
    [layer, _] = [layer for layer in fused.modules() if isinstance(layer, FusedLora)]
    seen = []
    handle = getattr(layer, role)["default"].register_forward_hook(lambda *_: seen.append(role))
    x = torch.randn(9, 24)
    hooked = fused(x)
    handle.remove()
    assert seen == [role]
    assert torch.equal(hooked, fused(x))
    assert seen == [role]


def test_layers_of_a_module_are_fused(toy_selector):
    kinds = {type(layer) for name, layer in toy_selector.named_modules() if name.endswith("q_proj")}
    assert kinds == {FusedLora}


@pytest.fixture(scope="module")
def toy_selector():
    from fedlight import SelectorModule

    module = SelectorModule("toy")
    module.configure_model()
    return module


def test_switching_adapters_off_asks_no_layer_for_its_state(toy_selector, monkeypatch):
    from fedlight.modules.language.adapters import disable_adapters

    network, ids = toy_selector.network, torch.arange(12)[None] + 5
    for name, weight in network.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight.data)
    network.eval()
    with torch.no_grad():
        adapted = network(ids).logits
        with network.disable_adapter():
            expected = network(ids).logits
    toy_selector.network.requires_grad_(True)
    monkeypatch.setattr(type(network), "get_layer_status", None)
    with torch.no_grad():
        with pytest.raises(KeyError, match="inside"), disable_adapters(network):
            with disable_adapters(network):
                pass
            assert torch.equal(network(ids).logits, expected)
            raise KeyError("inside")
        assert torch.equal(network(ids).logits, adapted)
    assert not torch.equal(adapted, expected)
