"""Loading, adapters, checkpoints and resuming, on an SFT module over a tiny Llama."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedlight.modules.language_model import LanguageModule
from fedlight.modules.selector import SelectorModule
from fedlight.modules.sft import SFTModule

ROOT = Path(__file__).parents[2]


def ready(module):
    module.configure_model()
    return module


def base_state(module) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in module.named_parameters() if not p.requires_grad}


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("base", ["plain", "int8", "nf4"])
def test_a_step_trains_the_adapter_alone(llama, base, make_trainer, loader, make_sft_batch):
    module = ready(SFTModule(llama, base=base, lr=1e-2, optimizer="SGD"))
    before, adapter = base_state(module), {k: v.clone() for k, v in module.state_dict().items()}
    trainer = make_trainer(max_epochs=1)
    trainer.fit(module, loader([make_sft_batch()]))
    assert math.isfinite(trainer.callback_metrics["train/loss"])
    assert same(before, base_state(module))
    changed = [name for name, value in module.state_dict().items() if not torch.equal(value, adapter[name])]
    assert changed == [name for name in adapter if "lora_B" in name]  # the gradient of A is 0 while B is 0


@pytest.mark.parametrize("settings", [{}, {"base": "int8"}, {"base": "nf4"}, {"dtype": "bf16"}])
def test_the_adapter_is_fp32_whatever_the_base_is(llama, settings):
    module = ready(SFTModule(llama, **settings))
    assert {value.dtype for value in module.state_dict().values()} == {torch.float32}
    expected = {"int8": torch.int8, "nf4": torch.uint8}.get(settings.get("base"), torch.float32)
    weight = module.causal_lm.model.layers[0].self_attn.q_proj.base_layer.weight
    assert weight.dtype == (torch.bfloat16 if settings.get("dtype") == "bf16" else expected)


@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_quantized_bases_compute_nearly_the_same(llama, base, make_sft_batch):
    plain, quantized = (ready(SFTModule(llama, base=b)).eval() for b in ("plain", base))
    batch = make_sft_batch()
    exact, rounded = plain.example_losses(batch), quantized.example_losses(batch)
    assert not torch.equal(exact, rounded)
    torch.testing.assert_close(exact, rounded, rtol=0.02 if base == "int8" else 0.2, atol=0)


def test_dropout_is_on_in_training_and_off_in_validation(llama, make_trainer, loader, make_sft_batch):
    module = ready(SFTModule(llama, lr=1e-9, lora_dropout=0.5))
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


def test_dropout_depends_on_epoch_and_texts_alone(llama, make_trainer, loader, make_sft_batch):
    def train(stream: int, disturb: bool):
        torch.manual_seed(stream)
        module = SFTModule(llama, lr=1e-2, lora_dropout=0.5)
        if disturb:
            module.on_before_optimizer_step = lambda *_: torch.rand(3)
        make_trainer().fit(module, loader([make_sft_batch(), make_sft_batch(seed=1)]))
        return module.state_dict()

    assert same(train(1, disturb=False), train(2, disturb=True))


def test_the_global_stream_is_left_alone(llama, make_sft_batch):
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


@pytest.fixture
def trained(llama, make_trainer, loader, make_sft_batch, tmp_path):
    """A trained module and its checkpoint."""
    module, trainer = SFTModule(llama, lr=1e-2), make_trainer()
    trainer.fit(module, loader([make_sft_batch()]))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    return module, tmp_path / "x.ckpt"


def test_a_checkpoint_holds_the_adapter_alone(trained):
    module, path = trained
    checkpoint = torch.load(path, weights_only=True)
    assert all("lora_" in name for name in checkpoint["state_dict"])
    assert len(checkpoint["state_dict"]) == 2 * 7 * 2
    assert checkpoint["base_model"] == {"model": module.hparams.model, "base": "plain", **module.base}


def test_reload(trained, make_sft_batch):
    module, path = trained
    batch = make_sft_batch(seed=9)
    again = SFTModule.load_from_checkpoint(path)
    assert same(module.state_dict(), again.state_dict())
    assert torch.equal(module.eval().example_losses(batch), again.eval().example_losses(batch))


def test_reload_in_a_fresh_process(trained):
    module, path = trained
    code = (
        "import sys; from fedlight.modules.language_model import LanguageModule\n"
        "print(LanguageModule.load_from_checkpoint(sys.argv[1]).generate(['the cat'], temperature=0, max_new_tokens=6))"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    output = subprocess.run(
        [sys.executable, "-c", code, str(path)], cwd=ROOT, env=environment, capture_output=True, check=True
    ).stdout.decode()
    assert output.splitlines()[-1] == str(module.generate(["the cat"], temperature=0, max_new_tokens=6))


def test_a_checkpoint_follows_a_model_that_moved(trained, llama, tmp_path):
    module, path = trained
    moved = tmp_path / "moved"
    moved.symlink_to(llama)
    assert same(module.state_dict(), SFTModule.load_from_checkpoint(path, model=str(moved)).state_dict())


def test_a_checkpoint_of_another_model(trained, other_llama):
    _, path = trained
    with pytest.raises(ValueError, match="this checkpoint belongs to another model: made on"):
        SFTModule.load_from_checkpoint(path, model=other_llama)


def test_a_trainer_refuses_a_checkpoint_of_another_model(
    trained, other_llama, make_trainer, loader, make_sft_batch
):
    _, path = trained
    with pytest.raises(ValueError, match="this checkpoint belongs to another model"):
        make_trainer(max_epochs=3).fit(
            SFTModule(other_llama), loader([make_sft_batch()]), ckpt_path=path, weights_only=True
        )


def test_a_checkpoint_of_another_rank(trained):
    _, path = trained
    with pytest.raises(
        ValueError, match=r"is \(8, 64\) in the checkpoint and \(4, 64\) here \(and 27 more\)"
    ):
        SFTModule.load_from_checkpoint(path, lora_rank=4)


def test_a_checkpoint_with_other_targets(trained):
    _, path = trained
    with pytest.raises(ValueError, match="is not in the module"):
        SFTModule.load_from_checkpoint(path, lora_targets=["q_proj"])


def test_a_damaged_checkpoint(trained):
    _, path = trained
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"text"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="is damaged or no checkpoint"):
            SFTModule.load_from_checkpoint(path)
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        SFTModule.load_from_checkpoint(path.with_name("y.ckpt"))
    torch.save({"weights": 1}, path)
    with pytest.raises(ValueError, match="has no state_dict"):
        SFTModule.load_from_checkpoint(path)


@pytest.mark.parametrize("base", ["plain", "int8", "nf4"])
def test_resumed_equals_uninterrupted(
    llama, base, make_trainer, loader, make_sft_batch, keep_every_epoch, tmp_path
):
    batches = [make_sft_batch(seed=seed) for seed in range(3)]
    settings = {"base": base, "lr": 1e-2, "lora_dropout": 0.3, "lr_schedule": "cosine"}
    whole = SFTModule(llama, **settings)
    make_trainer(max_epochs=3, callbacks=[keep_every_epoch]).fit(whole, loader(batches))
    for epoch in range(2):
        torch.manual_seed(epoch)
        resumed = SFTModule(llama, **settings)
        path = tmp_path / f"{epoch}.ckpt"
        make_trainer(max_epochs=3).fit(resumed, loader(batches), ckpt_path=path, weights_only=True)
        assert same(whole.state_dict(), resumed.state_dict())


def test_the_saved_adapter_is_a_peft_folder(trained, llama, tmp_path, make_sft_batch):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    module, _ = trained
    module.save_adapter(tmp_path / "adapter")
    batch = make_sft_batch(seed=4)
    base = AutoModelForCausalLM.from_pretrained(llama)
    with pytest.warns(FutureWarning, match="is_gradient_checkpointing"):
        loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    torch.testing.assert_close(loaded(**inputs).logits, module.network.eval()(**inputs).logits)


def test_start_from_an_adapter(trained, llama, tmp_path):
    module, _ = trained
    module.save_adapter(tmp_path / "adapter")
    again = ready(SFTModule(llama, adapter=str(tmp_path / "adapter"), lora_rank=2))
    assert same(module.state_dict(), again.state_dict())
    assert all(weight.requires_grad for name, weight in again.named_parameters() if "lora_" in name)


def test_merge_an_adapter(trained, llama, tmp_path, make_sft_batch):
    module, _ = trained
    module.save_adapter(tmp_path / "adapter")
    merged = ready(SFTModule(llama, adapter=str(tmp_path / "adapter"), merge_adapter=True, lora_rank=2))
    batch = make_sft_batch(seed=4)
    torch.testing.assert_close(module.eval().example_losses(batch), merged.eval().example_losses(batch))
    assert {value.shape[0] for name, value in merged.state_dict().items() if "lora_A" in name} == {2}
    assert merged.base["checksum"] == module.base["checksum"]
    assert merged.base != module.base


def test_save_merged_gives_a_model(trained, tmp_path, make_sft_batch):
    module, _ = trained
    before = base_state(module)
    module.save_merged(tmp_path / "whole")
    assert same(before, base_state(module))
    again = ready(SFTModule(str(tmp_path / "whole"), base="int8"))
    batch = make_sft_batch(seed=4)
    torch.testing.assert_close(
        module.eval().example_losses(batch), again.eval().example_losses(batch), rtol=0.02, atol=0
    )
    with pytest.raises(ValueError, match="needs base='plain', not 'int8'"):
        again.save_merged(tmp_path / "twice")


def test_adapters_that_do_not_fit(trained, llama, bert, tmp_path):
    module, _ = trained
    folder = str(tmp_path / "adapter")
    with pytest.raises(FileNotFoundError, match=r"has no adapter_config\.json"):
        ready(SFTModule(llama, adapter=folder))
    module.save_adapter(folder)
    with pytest.raises(ValueError, match="is LORA for CAUSAL_LM; needed is LORA for SEQ_CLS"):
        ready(SelectorModule(bert, head="classifier", adapter=folder))


def test_an_adapter_of_a_smaller_model_does_not_fit(trained, tmp_path, tmp_path_factory):
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    module, _ = trained
    module.save_adapter(tmp_path / "adapter")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    small = LlamaConfig(vocab_size=320, **sizes)
    LlamaForCausalLM(small).save_pretrained(tmp_path / "small")
    AutoTokenizer.from_pretrained(module.hparams.model).save_pretrained(tmp_path / "small")
    with pytest.raises(ValueError, match="does not fit this base"):
        ready(SFTModule(str(tmp_path / "small"), adapter=str(tmp_path / "adapter")))


def test_a_precision_that_rounds_the_adapter_is_refused(llama, make_trainer, loader, make_sft_batch):
    with pytest.raises(ValueError, match=r"trainer\.precision='bf16-true' would round the adapter"):
        make_trainer(precision="bf16-true").fit(SFTModule(llama), loader([make_sft_batch()]))


def test_the_base_class_has_no_loss(llama, make_sft_batch):
    with pytest.raises(NotImplementedError, match="use SFTModule, SelectorModule or DPOModule"):
        ready(LanguageModule(llama)).example_losses(make_sft_batch())


@pytest.mark.gpu
@pytest.mark.parametrize("base", ["plain", "int8", "nf4"])
def test_training_on_a_gpu(llama, base, make_trainer, loader, make_sft_batch):
    module, trainer = SFTModule(llama, base=base, lr=1e-2), make_trainer(accelerator="gpu", devices=1)
    trainer.fit(module, loader([make_sft_batch()]))
    assert math.isfinite(trainer.callback_metrics["train/loss"])
    assert {value.dtype for value in module.state_dict().values()} == {torch.float32}
    assert len(module.generate(["the cat", "a dog ran"], n=2, max_new_tokens=3)) == 2


@pytest.mark.skipif(
    not (Path(os.environ.get("FEDLIGHT_SHARED", "/nowhere")) / "models/stories260k").is_dir(),
    reason="FEDLIGHT_SHARED names no folder with models/stories260k",
)
def test_a_real_model_tells_a_story():
    module = ready(SFTModule(os.environ["FEDLIGHT_SHARED"] + "/models/stories260k"))
    [[story]] = module.generate(["Once upon a time"], temperature=0, max_new_tokens=30)
    assert "girl" in story or "boy" in story
