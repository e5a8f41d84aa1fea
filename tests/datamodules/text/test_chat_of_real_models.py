import pytest
from transformers import AutoTokenizer

from fedlight.datamodules.text.chat import write_turns
from fedlight.datamodules.text.encoding import encode_responses
from fedlight.datamodules.text.templates import Template
from fedlight.pretrained.named import find_pretrained


def tokenizer_of(name):
    try:
        folder = find_pretrained(name, "model")
    except OSError as error:
        pytest.skip(str(error))
    return AutoTokenizer.from_pretrained(folder)


def test_smollm2_reads_the_tokens_of_transformers_and_learns_its_answers():
    tokenizer = tokenizer_of("smollm2-135m-instruct")
    template = Template.named("chat", ["messages"]).for_tokenizer(tokenizer)
    said = ("user", "2+2?"), ("assistant", "4"), ("user", "Now 3+3?"), ("assistant", "It is 6.")
    whole = [{"role": role, "content": content} for role, content in said]
    fields = [{"messages": write_turns(whole[:-1])}]
    encoded = encode_responses(tokenizer, template, fields, ["It is 6."], 512, taught_turns="all")
    assert encoded.table[0].tolist() == tokenizer.apply_chat_template(whole, return_dict=True)["input_ids"]
    taught = encoded.table[0][encoded.taught[0] == 1].tolist()
    assert tokenizer.decode(taught) == "4<|im_end|>It is 6.<|im_end|>"
