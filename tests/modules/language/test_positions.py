import warnings

import pytest
import torch
import transformers
from tiny_world import fedlight, make_model, refused, tiny_selector

from fedlight.modules.language.data_checks import (
    check_max_tokens,
    check_texts,
    count_positions,
    has_position_table,
)

SMALL = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
NARROW = {**SMALL, "intermediate_size": 16, "max_position_embeddings": 12}
CONFIGS = {
    "gpt2": transformers.GPT2Config(vocab_size=20, n_positions=12, n_embd=16, n_layer=1, n_head=2),
    "opt": transformers.OPTConfig(**SMALL, ffn_dim=16, max_position_embeddings=12, word_embed_proj_dim=16),
    "bert": transformers.BertConfig(**NARROW),
    "roberta": transformers.RobertaConfig(**{**NARROW, "max_position_embeddings": 14}, pad_token_id=1),
    "llama": transformers.LlamaConfig(**NARROW),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_table_ends_where_it_is_said_to_end(name):
    """The model itself is the reference: one more token is an IndexError where positions are a table."""
    config = CONFIGS[name]
    assert count_positions(config) == 12
    assert has_position_table(config) == (name != "llama")
    network = transformers.AutoModel.from_config(config).eval()
    with torch.no_grad():
        network(input_ids=torch.full((1, 12), 5))
        if has_position_table(config):
            with pytest.raises((IndexError, RuntimeError)):
                network(input_ids=torch.full((1, 13), 5))
        else:
            network(input_ids=torch.full((1, 13), 5))


class Data:
    def __init__(self, max_tokens):
        self.max_tokens = max_tokens


def test_both_numbers_are_named():
    check_max_tokens(CONFIGS["gpt2"], "m", Data(12))
    check_max_tokens(CONFIGS["gpt2"], "m", Data(None))
    check_max_tokens(CONFIGS["gpt2"], "m", object())
    check_max_tokens(CONFIGS["llama"], "m", Data(13))
    with pytest.raises(
        ValueError, match=r"max_tokens=13 is above the 12 learned positions of model='m': set .* 12 or less"
    ):
        check_max_tokens(CONFIGS["gpt2"], "m", Data(13))


def test_a_batch_is_as_long_as_its_longest_text():
    one, two = torch.zeros(2, 12), torch.zeros(2, 13)
    assert check_texts(CONFIGS["llama"], {"input_ids": one, "labels": two}) is None
    pair = {"chosen": {"input_ids": one}, "rejected": {"input_ids": two}}
    assert "a text of 13 tokens is longer than the 12 positions" in check_texts(CONFIGS["llama"], pair)
    check_texts(CONFIGS["llama"], {"chosen": {"input_ids": one + 19}})
    with pytest.raises(
        ValueError, match=r"has token 20, and the model has 20, .*: set data.tokenizer to the"
    ):
        check_texts(CONFIGS["llama"], {"chosen": {"input_ids": one}, "rejected": {"input_ids": two + 20}})


def test_a_run_is_refused_before_it_reads_the_weights(tmp_path):
    model = make_model(tmp_path / "model")
    config = transformers.GPT2Config(vocab_size=20, n_positions=64, n_embd=16, n_layer=1, n_head=2)
    config.save_pretrained(model)  # the weights beside it are another model's
    line = refused(fedlight("fit", *tiny_selector(model, tmp_path / "run", "--data.max_tokens=65")))
    assert f"data.max_tokens=65 is above the 64 learned positions of model.init_args.model={model!r}" in line


def test_computed_positions_are_warned_of_once(tmp_path):
    model = make_model(tmp_path / "model")
    transformers.AutoConfig.from_pretrained(model, max_position_embeddings=16).save_pretrained(model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert fedlight("fit", *tiny_selector(model, tmp_path / "run")).code == 0
    what = "is longer than the 16 positions that the model was trained with"
    assert len([one for one in told if what in str(one.message)]) == 1
