"""The number type of a base: what ``auto`` is, that a run keeps it, and that modules work in bf16.

bf16 is really computed in: by instructions where this processor has them, else by torch's slower way.
"""

import logging
from inspect import unwrap
from types import SimpleNamespace

import pytest
import torch
from adapted import ready
from text_batches import make_choice_batch, make_pair_batch, make_sft_batch
from torch import nn
from tuned import tuned

from fedlight.devices import hardware
from fedlight.devices.measure import number_type
from fedlight.devices.measure.number_type import choose_dtype
from fedlight.devices.quantization import QuantizedBase, quantizable_layers
from fedlight.modules.dpo import DPOModule
from fedlight.modules.language import base_model
from fedlight.modules.language.adapters import Lora, trained_parameters
from fedlight.modules.reward import RewardModule
from fedlight.modules.selector import SelectorModule
from fedlight.modules.sft import SFTModule

NARROW = "fp32, as for every narrow model on a CPU (dtype: auto)"
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MODULES = {
    "sft": (SFTModule, "llama", {}),
    "selector": (SelectorModule, "llama", {"choices": ["A", "B"]}),
    "classifier": (SelectorModule, "bert", {"head": "classifier"}),
    "reward": (RewardModule, "llama", {}),
    "dpo": (DPOModule, "llama", {"beta": 0.1}),
}
WITHOUT_POOLER = {
    "classifier without pooler": (SelectorModule, "bert_without_pooler", {"head": "classifier"}),
    "reward without pooler": (RewardModule, "bert_without_pooler", {}),
}


@pytest.fixture(params=[True, False], ids=["has bf16", "lacks bf16"])
def has_bf16(request, monkeypatch) -> bool:
    """A machine whose devices have instructions for bf16, and one whose have none."""
    monkeypatch.setattr(hardware, "computes_bf16", lambda device: request.param)
    base_model.log_once.cache_clear()
    return request.param


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO)
    return lambda: [line for line in caplog.messages if " base" in line or line.startswith("base")]


@pytest.fixture
def build(request):
    """Makes a module of a kind, and a batch for it."""

    def make(kind, **settings):
        cls, model, own = (MODULES | WITHOUT_POOLER)[kind]
        module = ready(cls(request.getfixturevalue(model), **{"lora": Lora(dropout=0.0), **own, **settings}))
        batches = {SFTModule: make_sft_batch, SelectorModule: make_choice_batch}
        return module.eval(), batches.get(cls, make_pair_batch)()

    return make


def test_auto_is_fp32_for_a_narrow_model_on_every_cpu(has_bf16, monkeypatch):
    monkeypatch.setattr(number_type, "bf16_speed", lambda width: 9.0)
    assert choose_dtype("auto", CPU, 255).dtype == torch.float32
    assert choose_dtype("auto", torch.device("mps"), 4096).dtype == torch.float32


@pytest.mark.parametrize(("speed", "faster"), [(1.1, False), (1.2, True), (1.6, True)])
def test_auto_on_a_cpu_is_what_trains_faster(has_bf16, monkeypatch, speed, faster):
    monkeypatch.setattr(number_type, "bf16_speed", lambda width: speed)
    name, why = choose_dtype("auto", CPU, 576)
    assert name == ("bf16" if has_bf16 and faster else "fp32")
    assert (f"{speed:.1f} times as fast" if has_bf16 else "no instructions for bf16") in why


def test_the_speeds_are_those_of_training_steps(monkeypatch):
    """Steps of one layer of the model's width, up to 2048 and in whole heads; the random stream stays as it is."""
    seen = []

    def steps(sizes, kind, device, seconds):
        seen.append((sizes.width, sizes.layers, kind))
        torch.rand(3)
        return 30.0 if kind == torch.bfloat16 else 20.0

    monkeypatch.setattr(number_type, "step_flops", steps)
    before = torch.random.get_rng_state()
    assert number_type.bf16_speed.__wrapped__(600) == 1.5
    number_type.bf16_speed.__wrapped__(4096)
    assert seen[:2] == [(576, 1, torch.float32), (576, 1, torch.bfloat16)]
    assert seen[2][0] == 2048
    assert torch.equal(torch.random.get_rng_state(), before)


def test_auto_on_a_gpu_is_what_it_computes_in(has_bf16):
    name, why = choose_dtype("auto", CUDA, 4096)
    words = "bf16, in which this GPU computes", "fp16, as this GPU does not compute in bf16"
    assert f"{name}, {why}" == f"{words[not has_bf16]} (dtype: auto)"
    assert choose_dtype("auto", CUDA, 4096).dtype == (torch.bfloat16 if has_bf16 else torch.float16)


@pytest.mark.parametrize(("name", "dtype"), number_type.DTYPES.items())
def test_what_is_asked_for_is_taken(has_bf16, name, dtype):
    assert {choose_dtype(name, device, 4096).dtype for device in (CPU, CUDA)} == {dtype}


@pytest.mark.parametrize("base", base_model.BASES)
@pytest.mark.parametrize("kind", MODULES)
def test_auto_computes_the_same_on_every_cpu(build, kind, base, has_bf16):
    """As ``dtype: fp32`` does, bit for bit; also what is not quantized, and products with NF4 weights."""
    module, batch = build(kind, base=base)
    other, _ = build(kind, base=base, dtype="fp32")
    weights = dict(other.named_parameters())
    for name, weight in module.named_parameters():
        assert weight.dtype == weights[name].dtype
        assert weight.dtype in (torch.float32, torch.uint8, torch.int8)
    losses = [part.example_losses(batch) for part in (module, other)]
    assert losses[0].dtype == torch.float32
    assert torch.equal(*losses)


def test_a_devices_base_computes_the_same_on_every_cpu(build, has_bf16):
    """4 bits put under a base in fp32 are multiplied in fp32."""
    module, batch = build("sft")
    QuantizedBase(module).use(4)
    layers = quantizable_layers(module)
    held = [cell.cell_contents for layer in layers.values() for cell in unwrap(layer.forward).__closure__]
    twins = [part for part in held if isinstance(part, nn.Module) and hasattr(part, "compute_dtype")]
    assert {twin.compute_dtype for twin in twins} == {torch.float32}
    loaded, _ = build("sft", base="nf4", dtype="fp32")
    assert torch.equal(module.example_losses(batch), loaded.example_losses(batch))


@pytest.mark.parametrize(
    ("base", "words"),
    {"plain": "base in", "nf4": "nf4 base, computed in", "int8": "int8 base with the rest in"}.items(),
)
def test_what_was_chosen_is_said_once(build, has_bf16, said, base, words):
    for _ in range(2):
        build("sft", base=base)
    assert said() == [f"{words} {NARROW}"]


def test_bf16_that_will_be_slow_is_said_and_what_is_asked_for_else_needs_no_words(build, has_bf16, said):
    build("sft", dtype="fp32")
    assert said() == []
    build("sft", dtype="bf16")
    slow = "base in bf16, as asked for, without instructions of this processor: many times slower than dtype: fp32"
    assert said() == ([] if has_bf16 else [slow])


def wide_on_a_cpu_with_bf16(monkeypatch, speed):
    """The tiny models count as wide, on a CPU that trains so many times as fast in bf16."""
    monkeypatch.setattr(hardware, "computes_bf16", lambda device: True)
    monkeypatch.setattr(number_type, "NARROW", 1)
    monkeypatch.setattr(number_type, "bf16_speed", lambda width: speed)


def test_all_processes_take_what_the_first_one_measured(llama, monkeypatch):
    from fedlight.modules.language import module as language_module

    wide_on_a_cpu_with_bf16(monkeypatch, 1.0)
    monkeypatch.setattr(language_module, "once", lambda work: ("bf16", "as the first process says"))
    module = SFTModule(llama)
    monkeypatch.setattr(SFTModule, "trainer", SimpleNamespace(precision="32-true"))
    module.setup("fit")
    module.configure_model()
    assert module.causal_lm.dtype == torch.bfloat16


def test_a_run_on_a_gpu_has_the_type_in_which_it_computes(llama, monkeypatch):
    """Lightning gives a module its device before ``setup``, where torch's default device is still the CPU."""
    monkeypatch.setattr(hardware, "computes_bf16", lambda device: device.type == "cuda")
    monkeypatch.setattr(SFTModule, "trainer", SimpleNamespace(precision="32-true"))
    module = SFTModule(llama)
    module._device = torch.device("cuda", 0)
    module.setup("fit")
    module.on_save_checkpoint(checkpoint := {"base": None})
    assert checkpoint["number_type"] == "bf16"


@pytest.mark.parametrize("dtype", ["auto", "fp32"])
def test_a_checkpoint_keeps_what_auto_was(build, monkeypatch, tmp_path, dtype):
    """On a CPU without bf16, too; where the setting names a type that one counts."""
    wide_on_a_cpu_with_bf16(monkeypatch, 1.5)
    module, batch = build("sft", dtype=dtype)
    loss = module.example_losses(batch)
    checkpoint = {"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams)}
    module.on_save_checkpoint(checkpoint)
    torch.save({**checkpoint, "pytorch-lightning_version": "2.6.0"}, tmp_path / "one.ckpt")
    wide_on_a_cpu_with_bf16(monkeypatch, 1.0)
    loaded = SFTModule.load_from_checkpoint(tmp_path / "one.ckpt").eval()
    assert loaded.causal_lm.dtype == (torch.bfloat16 if dtype == "auto" else torch.float32)
    assert torch.equal(loaded.example_losses(batch), loss)


def test_a_second_run_saves_the_type_that_the_base_has(build, monkeypatch):
    """Also where ``auto`` would be another here, as after a run that went on from a checkpoint."""
    wide_on_a_cpu_with_bf16(monkeypatch, 1.5)
    module, _ = build("sft", dtype="auto")
    wide_on_a_cpu_with_bf16(monkeypatch, 1.0)
    monkeypatch.setattr(SFTModule, "trainer", SimpleNamespace(precision="32-true"))
    module.setup("test")
    module.on_save_checkpoint(checkpoint := {})
    assert (module.causal_lm.dtype, checkpoint["number_type"]) == (torch.bfloat16, "bf16")


@pytest.mark.parametrize("kind", MODULES)
def test_a_base_in_bf16_gives_the_losses_and_gradients_of_one_in_fp32(build, kind):
    """Within what rounding to 8 bits does to two random layers; what is trained is fp32 in both."""
    losses, gradients = [], []
    for dtype in ("fp32", "bf16"):
        module, batch = build(kind, dtype=dtype)
        tuned(module, 0.05)
        found = module.example_losses(batch)
        found.mean().backward()
        trained = trained_parameters(module)
        assert {weight.dtype for weight in trained.values()} == {torch.float32}
        frozen = {weight.dtype for weight in module.parameters() if not weight.requires_grad}
        assert base_model.DTYPES[dtype] in frozen
        losses.append(found.detach())
        gradients.append(torch.cat([weight.grad.flatten() for weight in trained.values()]))
    assert not torch.equal(*losses)
    torch.testing.assert_close(losses[1], losses[0], rtol=0.02, atol=0.1)
    assert nn.functional.cosine_similarity(*gradients, dim=0) > 0.98
    assert gradients[1].norm() == pytest.approx(gradients[0].norm().item(), rel=0.1)


WITH_HEADS = ["classifier", "reward", *WITHOUT_POOLER]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *((kind, {"dtype": "bf16"}) for kind in MODULES),
        *((kind, {"base": base}) for kind in WITH_HEADS for base in base_model.BASES),
    ],
    ids=str,
)
def test_a_module_learns_and_is_the_same_when_it_is_loaded_again(
    build, kind, settings, make_trainer, loader, tmp_path
):
    """From the checkpoint, and from the folder of its adapter, head included."""
    module, batch = build(kind, lr=1e-2, **settings)
    before = module.example_losses(batch).mean().item()
    trainer = make_trainer(max_epochs=4)
    trainer.fit(module.train(), loader([batch]))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    module.save_adapter(tmp_path / "adapter")
    found = module.eval().example_losses(batch)
    assert found.mean().item() < before
    again = type(module).load_from_checkpoint(tmp_path / "x.ckpt").eval()
    assert torch.equal(again.example_losses(batch), found)
    from_folder, _ = build(kind, adapter=str(tmp_path / "adapter"), seed=9, **settings)
    assert torch.equal(from_folder.example_losses(batch), found)
