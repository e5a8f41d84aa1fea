from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fedlight.pretrained.endings import end_tokens

WORDS = ["</s>", "<unk>", "user", "assistant", "first", "second", "question", "answer", ":"]
TURNS = "{% for m in messages %}<start> {{ m.role }} {{ m.content }} <turn> {% endfor %}"


def tokenizer(template):
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="<unk>")
    found.add_tokens([AddedToken("<turn>", special=True), AddedToken("<start>"), AddedToken("<tool>")])
    found.chat_template = template
    return found


def model(ends):
    return SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=ends))


@pytest.mark.parametrize(
    ("template", "ends", "expected"),
    [
        (None, None, [0]),
        (None, 7, [0, 7]),
        (None, [7, 0, 8], [0, 7, 8]),
        (TURNS, 0, [0, 9, 10]),  # <turn>, <start>
        (TURNS.replace("<start> ", ""), None, [0, 9]),
        ("{% for m in messages %}{{ m.role }} : {{ m.content }} </s> {% endfor %}", None, [0]),
        ("{{ messages[-1].content }}", None, [0]),  # earlier turns are left out
    ],
)
def test_ends_of_the_model_of_the_tokenizer_and_of_a_turn(template, ends, expected):
    assert end_tokens(model(ends), tokenizer(template)) == expected


def test_a_line_break_that_is_an_added_token_ends_no_answer():
    """As Gemma's: its turns end with <end_of_turn> and a line break."""
    found = tokenizer(TURNS.replace("<turn> ", "<turn>\n"))
    found.add_tokens([AddedToken("\n", normalized=False)])
    assert 12 in found("answer\n")["input_ids"]
    assert end_tokens(model(None), found) == [0, 9, 10]
