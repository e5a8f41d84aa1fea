import pytest
import torch
from adapted import ready
from text_batches import make_sft_batch

from fedlight.devices.cost import CostMeter
from fedlight.devices.shape import BatchShape
from fedlight.modules.dpo import DPOModule
from fedlight.modules.language.adapters import Lora, trained_parameters
from fedlight.modules.language.base_model import Execution
from fedlight.modules.reward import RewardModule
from fedlight.modules.selector import SelectorModule
from fedlight.modules.sft import SFTModule


def layout(module):
    return {name: (weight.shape, weight.requires_grad) for name, weight in module.named_parameters()}


KINDS = [
    (SFTModule, "llama", {}),
    (SFTModule, "llama", {"lora": Lora(targets=["q_proj", "down_proj"], rank=3)}),
    (SelectorModule, "llama", {"num_adapters": 3}),
    (SelectorModule, "llama", {"head": "classifier"}),
    (SelectorModule, "bert", {"head": "classifier"}),
    (DPOModule, "llama", {"dtype": "fp16"}),
    (RewardModule, "llama", {}),
    (RewardModule, "bert", {}),
]


HEADS = [(SelectorModule, encoder, {"head": "classifier"}) for encoder in ("distilbert", "deberta")]


@pytest.mark.parametrize("was_loaded", [False, True])
@pytest.mark.parametrize(("kind", "model", "settings"), [*KINDS, *HEADS])
def test_a_skeleton_has_the_parameters_of_its_module(kind, model, settings, was_loaded, request):
    module = kind(request.getfixturevalue(model), **settings)
    if was_loaded:
        module.configure_model()
    skeleton = module.skeleton()
    assert type(skeleton) is kind
    module.configure_model()
    assert layout(skeleton) == layout(module)
    for weight in skeleton.parameters():
        assert weight.is_meta
        assert weight.dtype == (torch.float32 if weight.requires_grad else torch.bfloat16)
    assert skeleton.adapter_names == module.adapter_names


def test_a_constructor_of_its_own_asks_for_a_skeleton_of_its_own():
    class Smooth(SelectorModule):
        def __init__(self, smoothing=0.1):
            super().__init__("toy", lora=Lora(rank=2))

    class Sketching(Smooth):
        def skeleton(self, dtype="bf16"):
            return SelectorModule("toy", lora=Lora(rank=2)).skeleton(dtype)

    class PassesOn(SelectorModule):
        def __init__(self, smoothing=0.1, **kwargs):
            super().__init__(**kwargs)

    with pytest.raises(
        ValueError, match=r"Smooth\.__init__ does not take .*'model'\): define Smooth\.skeleton\(\)"
    ):
        Smooth().skeleton()
    expected = layout(SelectorModule("toy", lora=Lora(rank=2)).skeleton())
    assert layout(CostMeter(Sketching()).module) == expected
    assert layout(PassesOn(0.2, model="toy", lora=Lora(rank=2)).skeleton()) == expected


@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_a_quantized_module_has_a_plain_skeleton(llama, base):
    module = SFTModule(llama, base=base)
    unloaded = module.skeleton("fp32")
    module.configure_model()
    assert layout(module.skeleton("fp32")) == layout(unloaded) == layout(SFTModule(llama).skeleton())
    assert {weight.dtype for weight in unloaded.parameters()} == {torch.float32}


def test_nothing_but_configs_is_read(llama, tmp_path):
    from transformers import AutoConfig

    AutoConfig.from_pretrained(llama).save_pretrained(tmp_path)
    cost = CostMeter(SFTModule(str(tmp_path))).cost(BatchShape(2, 9, 5))
    assert cost == CostMeter(SFTModule(llama)).cost(BatchShape(2, 9, 5))
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_the_adapter_to_start_from_gives_rank_and_number(llama, tmp_path):
    first = ready(SelectorModule(llama, num_adapters=3, lora=Lora(rank=2, targets=["v_proj"])))
    first.save_adapter(tmp_path / "saved")
    further = SelectorModule(llama, adapter=str(tmp_path / "saved"))
    assert layout(further.skeleton()) == layout(first)
    merged = SFTModule(llama, adapter=str(tmp_path / "saved/adapter0"), merge_adapter=True)
    assert layout(merged.skeleton()) == layout(SFTModule(llama).skeleton())
    # what a stage before this one will write
    not_yet_there = SFTModule(llama, adapter=str(tmp_path / "later"))
    assert layout(not_yet_there.skeleton()) == layout(SFTModule(llama).skeleton())


def test_a_batch_has_so_many_labels_where_something_is_predicted():
    batch = SFTModule("toy").sketch_batch(BatchShape(4, 10, 36))
    assert (batch["labels"][:, 1:] != -100).sum() == 36
    assert batch["input_ids"].shape == batch["attention_mask"].shape == batch["labels"].shape == (4, 10)
    with pytest.raises(ValueError, match="more responses than the 36 tokens"):
        SFTModule("toy").sketch_batch(BatchShape(4, 10, 37))
    pair = DPOModule("toy").sketch_batch(BatchShape(4, 10, 7))
    assert [int((pair[side]["labels"] != -100).sum()) for side in ("chosen", "rejected")] == [4, 3]


@pytest.mark.parametrize(("kind", "model", "settings"), [*KINDS[::3], KINDS[5], KINDS[7]])
def test_checkpointing_changes_no_gradient_and_leaves_no_trace(kind, model, settings, request):
    settings = {**settings, "dtype": "fp32"}
    module = ready(kind(request.getfixturevalue(model), lora=Lora(dropout=0.3), **settings))
    batch = module.sketch_batch(BatchShape(3, 12, 10))
    for texts in (batch, *(part for part in batch.values() if isinstance(part, dict))):
        if "input_ids" in texts:  # in a sketch all are 0, the padding, whose embedding is 0
            texts["input_ids"].random_(5, 300)

    def gradients():
        module.zero_grad()
        torch.manual_seed(5)
        module.example_losses(batch).mean().backward()
        found = {name: weight.grad for name, weight in trained_parameters(module).items()}
        return {name: grad.clone() for name, grad in found.items() if grad is not None}

    calls: list[int] = []
    expected = gradients()
    layer = next(part for name, part in module.named_modules() if name.endswith(("q_proj", "query")))
    hook = layer.register_forward_pre_hook(lambda *_: calls.append(1))
    module.checkpoint_gradients(True)
    found = gradients()
    assert len(calls) == 2  # before the backward pass, and in it
    module.checkpoint_gradients(False)
    again = gradients()
    hook.remove()
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name
        assert torch.equal(again[name], gradient), name
    assert any(gradient.abs().max() > 0 for gradient in expected.values())


def test_gradient_checkpointing_is_a_setting(llama):
    """The losses of the plain form, with layers computed twice, and less memory is counted."""
    plain, twice = (
        SFTModule(llama, lora=Lora(dropout=0.3), dtype="fp32", execution=Execution(gradient_checkpointing=on))
        for on in (False, True)
    )
    found = []
    for module in (plain, twice):
        module.configure_model()
        layer = next(part for name, part in module.named_modules() if name.endswith("q_proj"))
        calls: list[int] = []
        layer.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        module.checkpoint_gradients(False)  # as after a visit on an emulated device
        module.train()
        with module.dropout_masks.seeded(3):
            loss = module.example_losses(make_sft_batch()).mean()
        loss.backward()
        cost = CostMeter(module.skeleton("fp32")).cost(BatchShape(4, 32, 64))
        found.append((loss, len(calls), cost))
    (loss, once, cost), (same_loss, two, less) = found
    assert (once, two) == (1, 2)
    assert torch.equal(loss, same_loss)
    assert less.activation_bytes < 0.8 * cost.activation_bytes
    assert less == CostMeter(plain.skeleton("fp32")).cost(BatchShape(4, 32, 64), checkpointing=True)


@pytest.mark.parametrize("kind", [SFTModule, SelectorModule, DPOModule, RewardModule])
def test_texts_of_no_known_length_cost_nothing_that_could_be_counted(kind, llama):
    """As of data without train_lengths."""
    with pytest.raises(ValueError, match=r"do not say how long their texts are: .*set train_lengths"):
        CostMeter(kind(llama).skeleton()).cost(BatchShape(4))
