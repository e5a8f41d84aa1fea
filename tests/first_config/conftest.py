"""A model that reads any text, since its tokens are bytes; the embedded one knows the words of its world alone."""

import pytest
from tiny_world import write_rows

from fedlight.first_config.draft import Draft, Wishes, make_draft


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    signs = ["<pad>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({sign: number for number, sign in enumerate(signs)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("bytes")
    options = {"tokenizer_object": tokenizer, "pad_token": "<pad>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(**options).save_pretrained(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    sizes |= {"vocab_size": len(signs), "max_position_embeddings": 1024}
    LlamaForCausalLM(LlamaConfig(eos_token_id=1, bos_token_id=None, **sizes)).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def made(tmp_path, byte_model):
    """Draft for some rows."""

    def made(rows, model=byte_model, **wishes) -> Draft:
        return make_draft(Wishes(write_rows(tmp_path / "rows.jsonl", rows), model=model, **wishes))

    return made
