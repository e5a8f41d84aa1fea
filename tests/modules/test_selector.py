import adapted
import pytest
import torch
from text_batches import make_choice_batch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from fedlight.modules.language.adapters import Lora
from fedlight.modules.selector import SelectorModule, choice_tokens


def ready(*args, **kwargs) -> SelectorModule:
    return adapted.ready(SelectorModule(*args, **kwargs)).eval()


@pytest.mark.parametrize("base", ["plain", "int8", "nf4"])
def test_choice_logits_equal_full_logits(llama, base):
    module, batch = ready(llama, base=base), make_choice_batch()
    found = module.choice_logits(batch)
    rows = [module.tokenizer.convert_tokens_to_ids(token) for token in ("ĠA", "ĠB")]
    logits = module.network(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    last = batch["attention_mask"].sum(dim=1) - 1
    torch.testing.assert_close(found, logits[torch.arange(3), last][:, rows])


def test_the_head_over_the_vocabulary_is_never_computed(llama):
    module = ready(llama)

    def refuse(*_):
        raise AssertionError("the output head was called")

    module.causal_lm.lm_head.register_forward_hook(refuse)
    module.example_losses(make_choice_batch()).sum().backward()


def test_scaled_and_capped_heads(llama, tmp_path):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = Gemma2Config(
        vocab_size=320,
        num_key_value_heads=2,
        head_dim=8,
        final_logit_softcapping=0.5,
        initializer_range=0.3,
        **sizes,
    )
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(llama).save_pretrained(tmp_path)
    module, batch = ready(str(tmp_path)), make_choice_batch()
    logits = module.network(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    last = batch["attention_mask"].sum(dim=1) - 1
    expected = logits[torch.arange(3), last][:, module.choice_rows]
    assert expected.abs().max() > 0.3
    torch.testing.assert_close(module.choice_logits(batch), expected)


def test_an_unknown_head_is_refused(llama, monkeypatch):
    from transformers import LlamaForCausalLM

    plain = LlamaForCausalLM.forward

    def doubled(self, *args, **kwargs):
        output = plain(self, *args, **kwargs)
        output.logits = output.logits * 2
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", doubled)
    with pytest.raises(ValueError, match="llama computes its logits in an unknown way"):
        ready(llama)


def test_what_cannot_be_is_refused(llama, bert):
    with pytest.raises(ValueError, match=r"choices=\['Alpha', 'Beta'\].*'p', 'h', 'a'\]"):
        ready(llama, choices=["Alpha", "Beta"])
    with pytest.raises(ValueError, match="one distinct token"):
        ready(llama, choices=["A", "A"])
    with pytest.raises(ValueError, match="must be two words"):
        SelectorModule(llama, choices=["A", "B", "C"])
    with pytest.raises(ValueError, match=r"head='clasifier' .* did you mean 'classifier'"):
        SelectorModule(llama, head="clasifier")
    with pytest.raises(ValueError, match=r"lora\.targets names the output head"):
        ready(llama, lora=Lora(targets=["q_proj", "lm_head"]))
    with pytest.raises(ValueError, match="use head='choice'"):
        ready(bert, head="classifier").generate(["the cat"])


def test_a_word_level_tokenizer_has_to_know_both_choices():
    def tokenizer(*words):
        ids = {word: number for number, word in enumerate(("<unk>", ":", *words))}
        made = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")

    assert choice_tokens(tokenizer("A", "B"), ["A", "B"]) == [2, 3]
    with pytest.raises(ValueError, match=r"\[':', '<unk>'\]"):
        choice_tokens(tokenizer("A"), ["A", "B"])


@pytest.mark.parametrize("encoder", ["bert", "bert_without_pooler"])
def test_a_classifier_has_the_layers_that_its_base_lacks(request, encoder):
    names = set(ready(request.getfixturevalue(encoder), head="classifier").state_dict())
    assert any("classifier" in name for name in names)
    assert any("pooler.dense.modules_to_save" in name for name in names) == (encoder == "bert_without_pooler")


def test_an_encoder_that_reads_padding_is_refused(fnet):
    with pytest.raises(ValueError, match="fnet reads padding as text: use another model"):
        ready(fnet, head="classifier")


def test_a_decoder_can_have_a_classifier(llama, tmp_path):
    """Without a padding token in its config: then padding must not be read either."""
    network = AutoModelForCausalLM.from_pretrained(llama)
    network.config.pad_token_id = None
    network.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(llama).save_pretrained(tmp_path)
    module, batch = ready(str(tmp_path), head="classifier"), make_choice_batch()
    alone = {name: part[2:, :7] for name, part in batch.items() if name != "labels"}
    torch.testing.assert_close(module.choice_logits(batch)[2:], module.choice_logits(alone))


def test_a_new_head_follows_from_the_seed(bert):
    def head(stream: int, seed: int) -> torch.Tensor:
        torch.manual_seed(stream)
        state = ready(bert, head="classifier", seed=seed).state_dict()
        return state["network.base_model.model.classifier.modules_to_save.default.weight"]

    assert torch.equal(head(1, seed=0), head(2, seed=0))
    assert not torch.equal(head(1, seed=0), head(1, seed=1))


def test_a_classifier_sees_segments(bert):
    module, batch = ready(bert, head="classifier"), make_choice_batch()
    segments = {**batch, "token_type_ids": (torch.arange(9) > 4).long().expand(3, 9)}
    assert not torch.allclose(module.choice_logits(batch), module.choice_logits(segments))
