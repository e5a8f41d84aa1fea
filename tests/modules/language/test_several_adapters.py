import pytest
import torch
from adapted import ready, same
from peft import PeftModel, peft_model
from text_batches import make_choice_batch, make_pair_batch
from tiny_world import make_encoder
from transformers import AutoModelForSequenceClassification
from tuned import tuned

from fedlight.modules.dpo import DPOModule
from fedlight.modules.language.adapters import Lora
from fedlight.modules.language.optimizers import Optimization
from fedlight.modules.selector import SelectorModule
from fedlight.modules.sft import SFTModule


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> str:
    return make_encoder(tmp_path_factory.mktemp("encoder"))


def of(module, adapter: str) -> dict[str, torch.Tensor]:
    """A copy of what belongs to one adapter, under names without its own."""
    return {
        name.replace(f".{adapter}.", "."): weight.detach().clone()
        for name, weight in module.named_parameters()
        if adapter in name.split(".")
    }


def small_batch() -> dict[str, torch.Tensor]:
    """Token ids below 16: few words are enough for the encoder and the embedded model."""
    ids = torch.randint(4, 16, (3, 9), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor([0, 1, 1])}


PARTS = "lora_B", "modules_to_save"
"""Of names of weights: those that are trained and do not start at random."""
KINDS = {
    "toy": {"model": "toy"},
    "encoder": {"head": "classifier"},
    "encoder in bf16": {"head": "classifier", "dtype": "bf16"},
    "encoder in int8": {"head": "classifier", "base": "int8"},
    "bert without pooler": {"head": "classifier", "model": "bert_without_pooler"},
    "int8": {"model": "llama", "base": "int8"},
    "nf4": {"model": "llama", "base": "nf4"},
}


@pytest.fixture(params=KINDS)
def build(request, encoder):
    """A function that builds a selector of this kind with so many adapters, and a batch for it."""
    settings = {"model": encoder, "lora": Lora(dropout=0.3), **KINDS[request.param]}
    batch = small_batch() if settings["model"] in (encoder, "toy") else make_choice_batch()
    if settings["model"] in ("llama", "bert_without_pooler"):
        settings["model"] = request.getfixturevalue(settings["model"])
    return (
        lambda num_adapters=3, **more: SelectorModule(num_adapters=num_adapters, **settings, **more)
    ), batch


def test_training_one_leaves_the_others_bit_for_bit(build, make_trainer, loader):
    make, batch = build
    module = ready(make(lr=1e-2, optimizer=Optimization(args={"weight_decay": 0.5})))
    start = of(module, "adapter0")
    assert module.adapter_names == ["adapter0", "adapter1", "adapter2"]
    assert same(start, of(module, "adapter1"))
    assert same(start, of(module, "adapter2"))
    assert len(module.state_dict()) == 3 * len(start)
    assert {weight.dtype for weight in module.state_dict().values()} == {torch.float32}

    trainer, others = make_trainer(max_epochs=2), ("adapter0", "adapter2")
    module.on_train_start = lambda: module.use_adapter("adapter1")
    trainer.fit(module.train(), loader([batch, batch]))
    assert all(same(start, of(module, name)) for name in others)
    moved = [name for name, value in of(module, "adapter1").items() if not torch.equal(value, start[name])]
    assert set(moved) == set(start)  # with weight decay that is every weight, heads trained whole among them

    [group] = trainer.optimizers[0].param_groups
    trained = [weight for weight in module.parameters() if weight.requires_grad]
    assert {id(weight) for weight in group["params"]} == {id(weight) for weight in trained}
    assert len(group["params"]) == 3 * len(start)
    for name, weight in module.named_parameters():
        if weight.requires_grad:
            assert (weight.grad is not None) == ("adapter1" in name.split("."))

    module.eval()
    learned = module.choice_logits(batch)
    module.use_adapter("adapter2")
    assert not torch.equal(learned, module.choice_logits(batch))
    assert all(weight.grad is None for weight in module.parameters())
    module.use_adapter("adapter1")
    assert torch.equal(learned, module.choice_logits(batch))
    assert len(module.state_dict()) == 3 * len(start)


def test_all_are_saved_and_reloaded(build, make_trainer, loader, tmp_path, monkeypatch):
    make, batch = build
    module, trainer = tuned(make(), parts=PARTS), make_trainer(max_epochs=1)
    module.use_adapter("adapter2")
    trainer.fit(module.train(), loader([batch]))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    again = SelectorModule.load_from_checkpoint(tmp_path / "x.ckpt").eval()
    module.save_adapter(tmp_path / "adapters")
    monkeypatch.setattr(peft_model, "infer_device", lambda: "cuda")  # a machine with a GPU
    from_folder = ready(make(num_adapters=1, adapter=str(tmp_path / "adapters"), seed=9)).eval()
    one = ready(make(num_adapters=1, adapter=str(tmp_path / "adapters/adapter1"))).eval()
    assert (again.adapter_names, one.adapter_names) == (module.adapter_names, ["default"])
    for name in module.adapter_names:
        assert same(of(module, name), of(again, name))
    for name in module.adapter_names:
        for part in (module.eval(), from_folder):
            part.use_adapter(name)
        assert same(of(from_folder, name), of(module, name))
        if name == "adapter1":
            assert torch.equal(one.choice_logits(batch), module.choice_logits(batch))


def test_one_adapter_has_its_names_and_start(llama):
    one, three = ready(SFTModule(llama, seed=3)), ready(SFTModule(llama, seed=3, num_adapters=3))
    assert one.adapter_names == ["default"]
    assert all("default" in name.split(".") for name in one.state_dict())
    assert same(of(one, "default"), of(three, "adapter2"))
    one.use_adapter("default")
    with pytest.raises(ValueError, match="adapter='adapter3': did you mean 'adapter2'"):
        three.use_adapter("adapter3")


def test_layers_are_found_once(llama):
    """In a network that has an adapter already, a pattern also fits the layers inside of it."""
    module = ready(SFTModule(llama, num_adapters=3, lora=Lora(targets=".*q_proj.*")))
    assert len(of(module, "adapter0")) == len(of(module, "adapter2")) == 2 * 2


def test_peft_loads_each_folder_alone(encoder, tmp_path):
    module, batch = SelectorModule(encoder, head="classifier", num_adapters=11), small_batch()
    tuned(module, parts=PARTS).eval()
    module.save_adapter(tmp_path)
    assert not (tmp_path / "adapter_config.json").exists()
    for name in ("adapter1", "adapter10"):
        torch.manual_seed(77)
        base = AutoModelForSequenceClassification.from_pretrained(encoder, num_labels=2)
        loaded = PeftModel.from_pretrained(base, tmp_path / name).eval()
        inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
        module.use_adapter(name)
        torch.testing.assert_close(loaded(**inputs).logits, module.choice_logits(batch))


def test_all_start_from_one_folder(trained, llama, tmp_path):
    module, _ = trained
    module.save_adapter(tmp_path / "one")
    three = ready(SFTModule(llama, adapter=str(tmp_path / "one"), num_adapters=3))
    assert all(same(of(module, "default"), of(three, name)) for name in three.adapter_names)
    assert len(three.state_dict()) == 3 * len(module.state_dict())
    again = ready(SFTModule(llama, adapter=str(tmp_path / "one"), num_adapters=3, merge_adapter=True))
    assert len(again.adapter_names) == 3


def test_the_reference_of_dpo_freezes_none(llama):
    module, single = tuned(DPOModule(llama, num_adapters=2)).eval(), ready(DPOModule(llama)).eval()
    module.use_adapter("adapter1")
    batch = make_pair_batch()
    assert torch.equal(module.reference_log_probs(batch), single.reference_log_probs(batch))
    assert len(module.state_dict()) == 2 * len(single.state_dict())
    assert module.network.active_adapter == "adapter1"


def test_what_cannot_be_meant_is_refused(trained, llama, tmp_path):
    with pytest.raises(ValueError, match="num_adapters=0 must be in"):
        SFTModule(llama, num_adapters=0)
    module, _ = trained
    module.save_adapter(tmp_path / "one")
    three = ready(SFTModule(llama, num_adapters=3))
    with pytest.raises(ValueError, match=r"the folder has other adapters \(default\)"):
        three.save_adapter(tmp_path / "one")
    three.save_adapter(tmp_path / "three")
    with pytest.raises(ValueError, match=r"other adapters \(adapter0, adapter1, adapter2\)"):
        module.save_adapter(tmp_path / "three")
    folder = str(tmp_path / "three")
    with pytest.raises(ValueError, match=r"num_adapters=2, but adapter=.* has 3 adapters"):
        ready(SFTModule(llama, adapter=folder, num_adapters=2))
    with pytest.raises(ValueError, match=r"merge_adapter=true merges one adapter, but adapter=.* has 3"):
        ready(SFTModule(llama, adapter=folder, merge_adapter=True))
    with pytest.raises(ValueError, match="save_merged adds one adapter to the base, this module has 3"):
        three.save_merged(tmp_path / "whole")
    (tmp_path / "three/adapter1/adapter_config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"adapter1' has no adapter_config\.json"):
        ready(SFTModule(llama, adapter=folder))
    (tmp_path / "three/adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="has an adapter of its own and 2 in folders"):
        ready(SFTModule(llama, adapter=folder))
