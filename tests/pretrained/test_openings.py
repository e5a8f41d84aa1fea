import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from fedlight.modules.language.generation import encode_prompts
from fedlight.pretrained.openings import chat_starts, opening_ids, openings

WORDS = {"<s>": 0, "</s>": 1, "<unk>": 2, "user": 3, "hello": 4, "x": 5}
TURNS = "{% for m in messages %}<s> {{ m.role }} {{ m.content }} </s> {% endfor %}"
"""As SmolLM2's: the token opens every turn."""


def tokenizer(adds, template, bos="<s>"):
    made = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds:
        names = [(name, WORDS[name]) for name in ("<s>", "</s>")]
        made.post_processor = processors.TemplateProcessing(single=f"{adds} $A </s>", special_tokens=names)
    options = {"bos_token": bos, "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template, **options)


@pytest.mark.parametrize("template", [TURNS, TURNS.replace("<s> {{", "{{")], ids=["in template", "not there"])
@pytest.mark.parametrize("adds", ["<s>", ""], ids=["added", "not added"])
def test_a_text_of_the_chat_template_is_complete(adds, template):
    ours = tokenizer(adds, template)
    assert opening_ids(ours) == ([0] if adds else [])
    text = ours.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    (ids,) = encode_prompts(ours, [text])
    assert ids == ([0] if template == TURNS else []) + [3, 4, 1]


@pytest.mark.parametrize("adds", ["<s>", "", "</s>", "</s> <s>"])  # XGLM adds its end token, GLM two tokens
def test_other_texts_have_the_tokens_that_the_tokenizer_adds(adds):
    ours = tokenizer(adds, TURNS)
    assert encode_prompts(ours, ["hello user"]) == [[*map(WORDS.get, adds.split()), 4, 3]]
    ours.chat_template = None
    assert openings(ours, ["hello", "<s> hello"]) == [opening_ids(ours)] * 2


def test_a_tokenizer_without_opening_tokens_leaves_texts_alone():
    ours = tokenizer(adds="", template=TURNS, bos=None)
    assert opening_ids(ours) == []
    assert openings(ours, ["<s> hello"]) == [[]]


def test_conversations_begin_with_the_question_or_a_system_message():
    assert chat_starts(tokenizer("<s>", TURNS)) == ("<s> user ", "<s> system ")
    no_system = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + TURNS
    assert chat_starts(tokenizer("<s>", no_system)) == ("<s> user ",)
    assert chat_starts(tokenizer("<s>", None)) == ()
