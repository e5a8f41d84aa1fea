"""The tiny language model of the embedded world: what is in its folder, and that it can read and write a little."""

import random
from typing import TYPE_CHECKING

import pytest
import torch
from toy_abilities import reading, writing
from toy_exercises import QUESTIONS, answers, check_text, pair_text, summary_text
from toy_pretrain import Reader, make_model, make_tokenizer

from fedlight.support.seeding import derive_seed
from fedlight.toy import MODEL
from fedlight.toy.world import CHOICE_TEMPLATE, GENERATION_TEMPLATE, Traits

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

POST = "anna bakes bread . ben reads maps . carla keeps bees . dan fixes clocks ."


@pytest.fixture(scope="module")
def tokenizer() -> "PreTrainedTokenizerFast":
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model() -> "PreTrainedModel":
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(MODEL).eval()


def test_folder_is_small_and_safe() -> None:
    files = {path.name: path.stat().st_size for path in MODEL.iterdir()}
    assert sum(files.values()) < 5_000_000
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= set(files)
    assert not [name for name in files if name.endswith((".bin", ".pt", ".pkl"))]


def test_special_tokens_are_distinct_and_weights_fp32(
    tokenizer: "PreTrainedTokenizerFast", model: "PreTrainedModel"
) -> None:
    ids = [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id]
    assert len(set(ids)) == 4
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.vocab_size == len(tokenizer)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_the_tokenizer_is_the_one_of_the_script_and_knows_every_word_of_the_world(tokenizer) -> None:
    rng = random.Random(0)
    for text in [draw(rng) for draw in (summary_text, check_text, pair_text) for _ in range(40)]:
        assert tokenizer.unk_token_id not in tokenizer(text)["input_ids"]
    assert tokenizer.decode(tokenizer(POST)["input_ids"]) == POST
    assert make_tokenizer().get_vocab() == tokenizer.get_vocab()


def test_the_tokenizer_reads_choices_and_short_prompts(tokenizer) -> None:
    answers_given = {"response_a": "anna bakes bread .", "response_b": "ben reads maps ."}
    template = CHOICE_TEMPLATE.format(prompt=POST, **answers_given)
    assert template.endswith("YOUR CHOICE:")
    colon = tokenizer(":")["input_ids"]
    with_a, with_b = tokenizer(template + " A")["input_ids"], tokenizer(template + " B")["input_ids"]
    assert len(colon) == 1
    assert tokenizer(": A")["input_ids"] == colon + with_a[-1:]
    assert with_a[:-1] == with_b[:-1] == tokenizer(template)["input_ids"]
    assert with_a[-1] != with_b[-1]
    longest = "kindly " + POST.replace(". ", ". basically ")
    choice = CHOICE_TEMPLATE.format(prompt=POST, response_a=longest, response_b=longest)
    assert len(tokenizer(choice)["input_ids"]) <= 80
    assert len(tokenizer(GENERATION_TEMPLATE.format(prompt=POST))["input_ids"]) <= 24


def test_labels_of_pretraining(tokenizer: "PreTrainedTokenizerFast") -> None:
    single = GENERATION_TEMPLATE.format(prompt=POST).replace("SUMMARY", "CHECK")
    single += " anna bakes bread right . </s>"
    question = "A : ben reads maps .\nB : anna bakes pies wrong .\nwhich is longer ?\n"
    question += "YOUR CHOICE: B\nA covers 1"
    batch = Reader(tokenizer).batch([single, f"POST : {POST}\n{question}"])

    def learned(labels: torch.Tensor) -> str:
        return tokenizer.decode(labels[labels != -100])

    written = ["anna bakes bread . </s>", "ben reads maps . B : anna bakes pies ."]
    assert [learned(labels) for labels in batch.written] == written
    assert [learned(labels) for labels in batch.answered] == ["", "B"]
    assert [learned(labels) for labels in batch.judged] == ["right", "wrong 1"]


def test_heads_start_where_they_should() -> None:
    """Previous word and last marker, in the first layer of an untrained model; without it, learning takes far longer."""
    tokenizer = make_tokenizer()
    untrained = make_model(tokenizer, derive_seed(0, "toy", "first weights")).eval()
    untrained.set_attn_implementation("eager")
    text = f"POST : {POST} A : anna bakes pies . B : ben reads maps ."
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        previous_word, last_marker = untrained(input_ids=ids, output_attentions=True).attentions[0][0, :2]
    assert previous_word.argmax(-1).tolist() == [0, *range(ids.shape[1] - 1)]
    # POST stands at 0 and A at 18: words behind them look back there
    assert last_marker.argmax(-1)[[2, 9, 17, 20, 23]].tolist() == [0, 0, 0, 18, 18]


def test_it_reads_and_writes(model, tokenizer) -> None:
    for question, accuracy in reading(model, tokenizer, num_pairs=100).items():
        assert accuracy > 0.8, question
    found = writing(model, tokenizer, num_posts=40)
    assert 0.6 < found["true_share"] < 0.95
    assert found["junk"] < 0.1
    assert found["distinct_of_4"] > 3


def test_questions_and_their_answers_ask_nothing_of_the_votes() -> None:
    found = answers(Traits(1, 2, 0, 1, 10, 0), Traits(2, 0, 1, 0, 7, 0))
    assert list(found.values()) == ["A", "B", "A", "B", "A"]
    assert list(found) == list(QUESTIONS)
    assert answers(Traits(1, 0, 0, 0, 3, 0), Traits(1, 0, 0, 0, 3, 0)) == {}
    assert "better" in CHOICE_TEMPLATE
    assert not any("better" in question for question in QUESTIONS)
