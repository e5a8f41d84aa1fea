"""Tiny tokenizers: one token per word, so that lengths can be counted by hand."""

import pytest
from nested import nested
from real_rows import ALPACA, MTBENCH, SHP, TLDR, UKP
from tiny_world import write_rows
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast


def texts_in(value):
    """All texts in nested lists and objects."""
    if isinstance(value, (list, dict)):
        inner = value.values() if isinstance(value, dict) else value
        return [text for part in inner for text in texts_in(part)]
    return [value] if isinstance(value, str) else []


WORDS = "A B a b : CHOICE: POST: A: B: ANSWER: x y z long short good bad q r tie".split()  # noqa: SIM905
WORDS += [f"w{i}" for i in range(40)]
WORDS += sorted({*" ".join(texts_in([TLDR, SHP, ALPACA, UKP, MTBENCH])).split()} - {*WORDS})


def save_tokenizer(folder, specials, template, **names):
    vocabulary = {word: number for number, word in enumerate([*specials, *WORDS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=specials[0]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    single, pair = template
    used = [(word, vocabulary[word]) for word in specials if word in f"{single} {pair}"]
    tokenizer.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=used)
    names |= {"tokenizer_object": tokenizer, "unk_token": specials[0]}
    PreTrainedTokenizerFast(**names).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def causal(tmp_path_factory):
    """Folder of a causal model's tokenizer: <s> in front, </s> at the end of responses, no padding token."""
    folder, template = tmp_path_factory.mktemp("causal"), ("<s> $A", "<s> $A <s> $B")
    return save_tokenizer(folder, ["<unk>", "<s>", "</s>"], template, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def encoder(tmp_path_factory):
    """Folder of a BERT-like tokenizer."""
    folder, template = tmp_path_factory.mktemp("encoder"), ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1")
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    names["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    return save_tokenizer(folder, ["[UNK]", "[PAD]", "[CLS]", "[SEP]"], template, **names)


@pytest.fixture
def made(tmp_path, causal):
    """Make a datamodule of rows that lie in a file, with settings by their own names, and set it up."""

    def made(kind, rows, stages=("fit",), **settings):
        source = write_rows(tmp_path / "rows.jsonl", rows)
        module = kind(source, **nested(kind, **{"tokenizer": causal} | settings))
        for stage in stages:
            module.setup(stage)
        return module

    return made


@pytest.fixture
def tokenizer(causal):
    return PreTrainedTokenizerFast.from_pretrained(causal)


@pytest.fixture
def pair_tokenizer(encoder):
    return PreTrainedTokenizerFast.from_pretrained(encoder)


@pytest.fixture
def words():
    """Token ids -> text."""

    def decode(tokenizer, ids):
        return " ".join(tokenizer.convert_ids_to_tokens([int(token) for token in ids]))

    return decode


@pytest.fixture(autouse=True)
def told(caplog):
    """What is said of rows is kept."""
    caplog.set_level("INFO")
