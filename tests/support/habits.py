"""Fourteen tokenizers as real ones are made: their special tokens, blanks and chat templates."""

from typing import NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.pre_tokenizers import ByteLevel, Metaspace
from transformers import PreTrainedTokenizerFast

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;?!'[]/<>|#\n▁ "

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n\n{{ m.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|im_start|>{{ m.content }}{% else %}"
    "<|im_sep|>{{ m.content }}<|im_end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_sep|>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN_3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
PHI = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}{{ eos_token }}{% endif %}"
)
SMOLLM = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Habit(NamedTuple):
    """How a tokenizer treats a text.

    Attributes:
        template: its chat template.
        taught: text with loss where the answer is "Yes, two."
        adds: special tokens that it puts around every text: ``<s>``, ``<s> $A </s>``, or none.
        blanks: ``bytes`` or ``bytes, blank first``: byte-level; ``first``, ``always``, ``never``: where a blank is put.
        bos: its opening token.
    """

    template: str
    taught: str
    adds: str = ""
    blanks: str = "bytes"
    bos: str | None = "<s>"


HABITS = {
    "adds none, turns open with bos": Habit(SMOLLM, "Yes, two.<|im_end|>", bos="<|im_start|>"),
    "adds bos, bos in the template": Habit(LLAMA_3, "Yes, two.<|im_end|>", "<s> $A"),
    "adds bos, none in the template": Habit(CHATML, "Yes, two.<|im_end|>", "<s> $A"),
    "adds bos, the template begins with a word": Habit(PLAIN, " Yes, two.</s>", "<s> $A"),
    "blank first, bos in every exchange": Habit(LLAMA_2, " Yes, two. </s>", "<s> $A", "first"),
    "blank always, bos in the template": Habit(MISTRAL, "Yes, two.</s>", "<s> $A", "always"),
    "blank never, bos in the template alone": Habit(MISTRAL, "Yes, two.</s>", blanks="never"),
    "adds bos and eos": Habit(LLAMA_3, "Yes, two.<|im_end|>", "<s> $A </s>"),
    "bytes with a blank first, no bos": Habit(
        CHATML, "Yes, two.<|im_end|>", blanks="bytes, blank first", bos=None
    ),
    "the question ends with a special token": Habit(DEEPSEEK, "Yes, two.<|im_end|>", "<s> $A"),
    "answers marked without their end token": Habit(MARKED, "Yes, two.<|im_end|>"),
    "thoughts before the last answer": Habit(QWEN_3, "<think>\n\n</think>\n\nYes, two.<|im_end|>"),
    "no system message, another name": Habit(GEMMA, "Yes, two.<|im_end|>", "<s> $A"),
    "a text's end after the last turn's": Habit(PHI, "Yes, two.<|im_end|>"),
}


def make_tokenizer(habit: Habit) -> PreTrainedTokenizerFast:
    """Return a tokenizer of single characters or bytes, and a few special tokens."""
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|im_sep|>"]
    letters = ByteLevel.alphabet() if habit.blanks.startswith("bytes") else LETTERS
    merges = [("Y", "e"), ("Ye", "s")]
    words = [*special, *dict.fromkeys(letters), "Ye", "Yes"]
    made = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, merges))
    made.pre_tokenizer = (
        pre_tokenizers.ByteLevel(add_prefix_space=habit.blanks != "bytes")
        if habit.blanks.startswith("bytes")
        else Metaspace(prepend_scheme=habit.blanks)
    )
    made.decoder = decoders.ByteLevel() if habit.blanks.startswith("bytes") else decoders.Metaspace()
    if habit.adds:
        ids = [("<s>", 0), ("</s>", 1)]
        made.post_processor = processors.TemplateProcessing(single=habit.adds, special_tokens=ids)
    names = {"eos_token": "</s>", **({"bos_token": habit.bos} if habit.bos else {})}
    more = ["<|im_start|>", "<|im_end|>", "<|im_sep|>"]
    return PreTrainedTokenizerFast(
        tokenizer_object=made, chat_template=habit.template, extra_special_tokens=more, **names
    )
