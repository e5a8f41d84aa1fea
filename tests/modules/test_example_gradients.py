import pytest
import torch
from text_batches import make_sft_batch
from tuned import tuned

from fedlight.augmentation.less.example_gradients import example_gradients
from fedlight.modules.language.adapters import Lora, trained_parameters
from fedlight.modules.sft import SFTModule

WAYS = ("func", "layers")


def make_module(model, **options):
    """An adapter that has been trained, as B = 0 would leave A without gradients; without dropout."""
    return tuned(SFTModule(model, **{"dtype": "fp32", "lora": Lora(rank=3), **options}), 0.05, seed=5).eval()


def one_by_one(module, batch):
    """Name -> (batch, ...), each example cut to its own length."""
    weights, rows = trained_parameters(module), []
    for row, length in enumerate(batch["attention_mask"].sum(dim=1)):
        one = {name: part[row : row + 1, :length] for name, part in batch.items()}
        rows.append(torch.autograd.grad(module.example_losses(one).sum(), list(weights.values())))
    return {name: torch.stack(parts) for name, *parts in zip(weights, *rows, strict=True)}


def assert_same(found, expected, rtol=1e-4):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        difference = (found[name].float() - gradient).abs().max() / gradient.abs().max()
        assert difference < rtol, (name, difference)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layers", ["all-linear", r".*\.[qv]_proj"])
def test_equals_a_loop_over_examples(llama, way, layers):
    module = make_module(llama, lora=Lora(rank=3, targets=layers))
    batch = make_sft_batch(batch=5)
    assert_same(example_gradients(module, batch, way), one_by_one(module, batch))


@pytest.mark.parametrize("way", WAYS)
def test_equals_a_loop_on_a_base_in_half_precision(llama, way):
    module = make_module(llama, dtype="bf16")
    batch = make_sft_batch(batch=3)
    found = example_gradients(module, batch, way)
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}
    assert_same(found, one_by_one(module, batch), rtol=0.05)  # bf16 has 8 bits


@pytest.mark.parametrize("way", WAYS)
def test_an_example_without_labels_has_no_gradient(llama, way):
    module, batch = make_module(llama), make_sft_batch(batch=2)
    batch["labels"][1] = -100
    found = example_gradients(module, batch, way)
    assert all(gradient[1].abs().max() == 0 for gradient in found.values())
    assert all(gradient[0].abs().max() > 0 for gradient in found.values())


@pytest.mark.parametrize("way", WAYS)
def test_the_module_stays_as_it_was(llama, way):
    module, batch = make_module(llama), make_sft_batch()
    weights = trained_parameters(module)
    before = {name: weight.clone() for name, weight in weights.items()}
    for weight in weights.values():
        weight.grad = torch.ones_like(weight)
    drawn = torch.get_rng_state()
    example_gradients(module, batch, way)
    assert all(torch.equal(weight, before[name]) for name, weight in weights.items())
    assert all((weight.grad == 1).all() for weight in weights.values())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(not layer._forward_hooks for layer in module.modules())


def test_layers_go_through_a_quantized_base(llama):
    pytest.importorskip("bitsandbytes")
    module, batch = make_module(llama, base="nf4"), make_sft_batch(batch=4)
    found = example_gradients(module, batch, "layers")
    assert_same(found, one_by_one(module, batch))
    plain = example_gradients(make_module(llama), batch, "layers")
    assert any((plain[name] - gradient).abs().max() > 1e-3 for name, gradient in found.items())


def test_layers_take_linear_layers_alone(llama):
    module, batch = make_module(llama), make_sft_batch()
    module.causal_lm.model.norm.weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"norm.weight is trained: set it to 'func'"):
        example_gradients(module, batch, "layers")
    expected = one_by_one(module, batch)
    assert_same(example_gradients(module, batch, "func"), expected)
