"""A text reaches the model with its first token once, whoever puts it there: the tokenizer or the chat template."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from fedlight.modules.language.generation import encode_prompts
from fedlight.pretrained.openings import opening_ids, without_opening

WORDS = {"<s>": 0, "</s>": 1, "<unk>": 2, "user": 3, "hello": 4, "x": 5}
TURNS = "{% for m in messages %}<s> {{ m.role }} {{ m.content }} </s> {% endfor %}"
"""As SmolLM2's: the token opens every turn."""


def tokenizer(adds, template, bos="<s>"):
    made = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    options = {"bos_token": bos, "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template, **options)


@pytest.mark.parametrize(
    "template", [TURNS, TURNS.replace("<s> {{", "{{")], ids=["in the template", "not there"]
)
@pytest.mark.parametrize("adds", [True, False], ids=["added", "not added"])
def test_the_model_reads_what_the_template_and_the_tokenizer_say(adds, template):
    ours = tokenizer(adds, template)
    assert opening_ids(ours) == ([0] if adds else [])
    text = ours.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    (ids,) = encode_prompts(ours, [without_opening(ours, text)])
    assert ids == ([0] if adds or template == TURNS else []) + [3, 4, 1]


def test_a_tokenizer_without_an_opening_token_leaves_texts_alone():
    ours = tokenizer(adds=False, template=TURNS, bos=None)
    assert opening_ids(ours) == []
    assert without_opening(ours, "<s> hello") == "<s> hello"
