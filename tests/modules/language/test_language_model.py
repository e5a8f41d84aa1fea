import math
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from adapted import base_state, ready, same
from habits import HABITS, make_tokenizer
from text_batches import make_sft_batch
from tokenizers import Tokenizer
from tokenizers.models import BPE

from fedlight import InstructionDataModule
from fedlight.modules.language.adapters import Lora
from fedlight.modules.language.data_checks import check_tokenizer
from fedlight.modules.language.module import LanguageModule
from fedlight.modules.language.optimizers import Optimization
from fedlight.modules.reward import RewardModule
from fedlight.modules.sft import SFTModule


@pytest.mark.parametrize("base", ["plain", "int8", "nf4"])
def test_a_step_trains_the_adapter_alone(llama, base, make_trainer, loader):
    module = ready(SFTModule(llama, base=base, lr=1e-2, optimizer=Optimization(name="SGD")))
    before, adapter = base_state(module), {k: v.clone() for k, v in module.state_dict().items()}
    trainer = make_trainer(max_epochs=1)
    trainer.fit(module, loader([make_sft_batch()]))
    assert math.isfinite(trainer.callback_metrics["train/loss"])
    assert same(before, base_state(module))
    changed = [name for name, value in module.state_dict().items() if not torch.equal(value, adapter[name])]
    assert changed == [name for name in adapter if "lora_B" in name]  # the gradient of A is 0 while B is 0


def test_data_of_another_tokenizer_are_refused(llama, make_trainer, tmp_path):
    make_tokenizer(HABITS["adds bos and eos"]).save_pretrained(tmp_path)
    data = InstructionDataModule([{"instruction": "a", "response": "cat"}] * 4, tokenizer=str(tmp_path))
    with pytest.raises(
        ValueError, match=f"data.tokenizer='{tmp_path}' gives tokens other numbers .*: set it to"
    ):
        make_trainer().fit(SFTModule(llama), data)


def test_a_tokenizer_without_a_name_is_left_to_its_project():
    data = SimpleNamespace(tokenizer=Tokenizer(BPE()))
    check_tokenizer(make_tokenizer(HABITS["adds bos and eos"]), data)


@pytest.mark.parametrize("settings", [{}, {"base": "int8"}, {"base": "nf4"}, {"dtype": "bf16"}])
def test_the_adapter_is_fp32_whatever_the_base_is(llama, settings):
    module = ready(SFTModule(llama, **settings))
    assert {value.dtype for value in module.state_dict().values()} == {torch.float32}
    expected = {"int8": torch.int8, "nf4": torch.uint8}.get(settings.get("base"), torch.float32)
    weight = module.causal_lm.model.layers[0].self_attn.q_proj.base_layer.weight
    assert weight.dtype == (torch.bfloat16 if settings.get("dtype") == "bf16" else expected)


@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_quantized_bases_compute_nearly_the_same(llama, base):
    plain, quantized = (ready(SFTModule(llama, base=b)).eval() for b in ("plain", base))
    batch = make_sft_batch()
    exact, rounded = plain.example_losses(batch), quantized.example_losses(batch)
    assert not torch.equal(exact, rounded)
    torch.testing.assert_close(exact, rounded, rtol=0.02 if base == "int8" else 0.2, atol=0)


def test_dropout_is_on_in_training_and_off_in_validation(llama, make_trainer, loader):
    module = ready(SFTModule(llama, lr=1e-9, lora=Lora(dropout=0.5)))
    with torch.no_grad():
        for name, weight in module.state_dict().items():
            weight.add_(0.1 if "lora_B" in name else 0)
    losses = {"train": set(), "val": set()}
    plain = module.example_losses

    def spy(batch):
        values = plain(batch)
        losses["train" if module.trainer.training else "val"].add(round(values.mean().item(), 4))
        return values

    module.example_losses = spy
    batches = loader([make_sft_batch()])
    make_trainer(max_epochs=3, num_sanity_val_steps=0).fit(module, batches, batches)
    assert len(losses["train"]) == 3
    assert len(losses["val"]) == 1


def test_dropout_depends_on_epoch_and_texts_alone(llama, make_trainer, loader):
    def train(stream: int, disturb: bool):
        torch.manual_seed(stream)
        module = SFTModule(llama, lr=1e-2, lora=Lora(dropout=0.5))
        if disturb:
            module.on_before_optimizer_step = lambda *_: torch.rand(3)
        make_trainer().fit(module, loader([make_sft_batch(), make_sft_batch(seed=1)]))
        return module.state_dict()

    assert same(train(1, disturb=False), train(2, disturb=True))


def test_the_global_stream_is_left_alone(llama):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    module = ready(SFTModule(llama))
    module.log = lambda *_, **__: None
    module.training_step(make_sft_batch(), 0)
    module.generate(["the cat"], max_new_tokens=2)
    assert torch.equal(torch.rand(1), expected)


def test_adapters_of_one_seed_start_equal(llama):
    one, same_seed, other = (ready(SFTModule(llama, seed=seed)).state_dict() for seed in (3, 3, 4))
    assert same(one, same_seed)
    assert not same(one, other)


def test_configure_model_twice_keeps_the_model(llama):
    module = ready(SFTModule(llama))
    network = module.network
    module.configure_model()
    assert module.network is network


def test_nothing_is_loaded_before_it_is_needed(llama):
    module = SFTModule(llama)
    assert list(module.parameters()) == []
    assert module.hparams.model == llama


def test_a_precision_that_rounds_the_adapter_is_refused(llama, make_trainer, loader):
    with pytest.raises(ValueError, match=r"trainer\.precision='bf16-true' would round the adapter"):
        make_trainer(precision="bf16-true").fit(SFTModule(llama), loader([make_sft_batch()]))


def test_the_base_class_has_no_loss(llama):
    with pytest.raises(NotImplementedError, match="use SFTModule, SelectorModule, RewardModule or DPOModule"):
        ready(LanguageModule(llama)).example_losses(make_sft_batch())


@pytest.mark.gpu
@pytest.mark.parametrize("base", ["plain", "int8", "nf4"])
def test_training_on_a_gpu(llama, base, make_trainer, loader):
    module, trainer = SFTModule(llama, base=base, lr=1e-2), make_trainer(accelerator="gpu", devices=1)
    trainer.fit(module, loader([make_sft_batch()]))
    assert math.isfinite(trainer.callback_metrics["train/loss"])
    assert {value.dtype for value in module.state_dict().values()} == {torch.float32}
    assert len(module.generate(["the cat", "a dog ran"], n=2, max_new_tokens=3)) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("base", ["plain", "nf4"])
@pytest.mark.parametrize(
    ("kind", "model"), [(SFTModule, "llama"), (RewardModule, "llama"), (RewardModule, "bert")]
)
def test_adapters_begin_alike_on_a_gpu(request, kind, model, base):
    options = {"model": request.getfixturevalue(model), "num_adapters": 2, "dtype": "fp32", "base": base}
    with torch.device("cuda"):
        there = ready(kind(**options))
    here = ready(kind(**options)).state_dict()
    assert {value.device.type for value in there.state_dict().values()} == {"cuda"}
    assert all(torch.equal(value.cpu(), here[name]) for name, value in there.state_dict().items())


@pytest.mark.skipif(
    not (Path(os.environ.get("FEDLIGHT_SHARED", "/nowhere")) / "models/stories260k").is_dir(),
    reason="FEDLIGHT_SHARED names no folder with models/stories260k",
)
def test_a_real_model_tells_a_story():
    module = ready(SFTModule(os.environ["FEDLIGHT_SHARED"] + "/models/stories260k"))
    [[story]] = module.generate(["Once upon a time"], temperature=0, max_new_tokens=30)
    assert "girl" in story or "boy" in story
