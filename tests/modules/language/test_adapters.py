import pytest
import torch
from adapted import base_state, ready, same
from architectures import GATED
from text_batches import make_sft_batch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from fedlight.modules.language.adapters import Lora
from fedlight.modules.selector import SelectorModule
from fedlight.modules.sft import SFTModule


@pytest.fixture
def saved(trained, tmp_path):
    """A trained module and the folder of its adapter."""
    trained[0].save_adapter(tmp_path / "adapter")
    return trained[0], str(tmp_path / "adapter")


def test_the_saved_adapter_is_a_peft_folder(saved, llama):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    module, adapter = saved
    batch = make_sft_batch(seed=4)
    base = AutoModelForCausalLM.from_pretrained(llama)
    loaded = PeftModel.from_pretrained(base, adapter).eval()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    torch.testing.assert_close(loaded(**inputs).logits, module.network.eval()(**inputs).logits)


def test_start_from_an_adapter(saved, llama):
    module, adapter = saved
    again = ready(SFTModule(llama, adapter=adapter, lora=Lora(rank=2)))
    assert same(module.state_dict(), again.state_dict())
    assert all(weight.requires_grad for name, weight in again.named_parameters() if "lora_" in name)


def test_merge_an_adapter(saved, llama):
    module, adapter = saved
    merged = ready(SFTModule(llama, adapter=adapter, merge_adapter=True, lora=Lora(rank=2)))
    batch = make_sft_batch(seed=4)
    torch.testing.assert_close(module.eval().example_losses(batch), merged.eval().example_losses(batch))
    assert {value.shape[0] for name, value in merged.state_dict().items() if "lora_A" in name} == {2}
    assert merged.base["checksum"] == module.base["checksum"]
    assert merged.base != module.base


def test_save_merged_gives_a_model(trained, tmp_path):
    module, _ = trained
    before = base_state(module)
    module.save_merged(tmp_path / "whole")
    assert same(before, base_state(module))
    again = ready(SFTModule(str(tmp_path / "whole"), base="int8"))
    exact, rounded = (made.eval().example_losses(make_sft_batch(seed=4)) for made in (module, again))
    torch.testing.assert_close(exact, rounded, rtol=0.02, atol=0)
    with pytest.raises(ValueError, match="needs base='plain', not 'int8'"):
        again.save_merged(tmp_path / "twice")


def test_layers_that_are_compiled_are_saved_as_others(trained, llama, tmp_path):
    module, _ = trained
    layers, batch = module.causal_lm.model.layers, make_sft_batch(seed=4)
    plain = [*layers]
    for number, layer in enumerate(plain):
        layers[number] = torch.compile(layer, backend="eager")
    module.save_adapter(tmp_path / "adapter")
    module.save_merged(tmp_path / "whole")
    for number, layer in enumerate(plain):  # the fixture is others' too
        layers[number] = layer
    for settings in (
        {"model": llama, "adapter": str(tmp_path / "adapter")},
        {"model": str(tmp_path / "whole")},
    ):
        again = ready(SFTModule(**settings)).eval()
        torch.testing.assert_close(again.example_losses(batch), module.eval().example_losses(batch))


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_an_adapter_of_a_weight_that_layers_share_is_not_merged(llama, tmp_path):
    """The embedding would get the head's adapter as well."""
    folder = str(tmp_path / "tied")
    LlamaForCausalLM(LlamaConfig(**GATED, tie_word_embeddings=True)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(llama).save_pretrained(folder)
    module = ready(SFTModule(folder, lora=Lora(targets=["q_proj", "lm_head"])))
    with pytest.raises(ValueError, match="adapter of lm_head cannot be added to its weight"):
        module.save_merged(tmp_path / "whole")
    module.save_adapter(tmp_path / "adapter")
    tied = {"adapter": str(tmp_path / "adapter"), "merge_adapter": True}
    with pytest.raises(ValueError, match="adapter of lm_head cannot be added to its weight"):
        ready(SFTModule(folder, **tied))


def test_adapters_that_do_not_fit(saved, llama, bert, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no adapter_config\.json"):
        ready(SFTModule(llama, adapter=str(tmp_path / "nothing")))
    with pytest.raises(ValueError, match="is LORA for CAUSAL_LM; needed is LORA for SEQ_CLS"):
        ready(SelectorModule(bert, head="classifier", adapter=saved[1]))


@pytest.fixture
def foreign(llama, tmp_path):
    """Save an adapter by PEFT alone, with its settings, and return its folder."""

    def save(**settings):
        from peft import LoraConfig, get_peft_model

        base = LlamaForCausalLM.from_pretrained(llama)
        config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", **settings)
        network = get_peft_model(base, config)
        network.save_pretrained(str(tmp_path / "foreign"), save_embedding_layers=False)
        return str(tmp_path / "foreign")

    return save


@pytest.mark.parametrize(
    ("setting", "value"), [("bias", "all"), ("init_lora_weights", "pissa"), ("init_lora_weights", "olora")]
)
def test_a_foreign_adapter_that_changes_the_base_is_merged_or_refused(foreign, llama, setting, value):
    """Answers without it, such as those of DPO's reference, would not be the base's."""
    from peft import PeftModel

    folder = foreign(**{setting: value})
    with pytest.raises(ValueError, match=f"{setting}={value}, which also changes the base"):
        ready(SFTModule(llama, adapter=folder))
    merged = ready(SFTModule(llama, adapter=folder, merge_adapter=True)).eval()
    plain = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(llama), folder).eval()
    inputs = {name: make_sft_batch(seed=4)[name] for name in ("input_ids", "attention_mask")}
    torch.testing.assert_close(merged.network(**inputs).logits, plain(**inputs).logits, rtol=1e-4, atol=1e-5)


def test_embeddings_of_a_foreign_adapter_are_trained_on(foreign, llama):
    module = ready(SFTModule(llama, adapter=foreign(modules_to_save=["embed_tokens"])))
    module.example_losses(make_sft_batch(seed=4)).mean().backward()
    (embeddings,) = (
        weight for name, weight in module.named_parameters() if "embed_tokens.modules_to" in name
    )
    assert embeddings.grad.count_nonzero()


def test_an_adapter_of_a_smaller_model_does_not_fit(saved, tmp_path):
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    module, adapter = saved
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    small = LlamaConfig(vocab_size=320, **sizes)
    LlamaForCausalLM(small).save_pretrained(tmp_path / "small")
    AutoTokenizer.from_pretrained(module.hparams.model).save_pretrained(tmp_path / "small")
    with pytest.raises(ValueError, match=r"does not fit this base: .*size mismatch for"):
        ready(SFTModule(str(tmp_path / "small"), adapter=adapter))
