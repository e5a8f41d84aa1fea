import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from fedlight.datamodules.text.encoding import (
    Comparison,
    choice_ids,
    encode_choice,
    encode_pair,
    encode_responses,
)
from fedlight.datamodules.text.templates import Template
from fedlight.datamodules.text.tokens import Parts, fit_texts, pad_id
from fedlight.pretrained.hub import load_tokenizer

CHOICE = Template("POST: {post} A: {response_a} B: {response_b} CHOICE:", trim="post")
ANSWER = Template("POST: {post} ANSWER:", trim="post")


def compare(post, first="x", second="y z"):
    return Comparison({"post": post}, first, second)


# Ten tokens beside the post: <s> POST: A: x B: y z CHOICE: are 8, and two of the post fit into 10.
@pytest.mark.parametrize(("max_tokens", "post"), [(12, "w0 w1 w2 w3"), (11, "w0 w1 w2"), (9, "w0"), (8, "")])
def test_the_post_alone_is_cut(tokenizer, words, max_tokens, post):
    encoded = encode_choice(tokenizer, CHOICE, [compare("w0 w1 w2 w3")], max_tokens)
    if not post:
        assert encoded.both_kept().tolist() == [False]
        assert len(encoded.table[0]) == len(encoded.table[1]) == 0
        return
    assert words(tokenizer, encoded.table[0]) == f"<s> POST: {post} A: x B: y z CHOICE:"
    assert words(tokenizer, encoded.table[1]) == f"<s> POST: {post} A: y z B: x CHOICE:"
    assert encoded.trimmed == (0 if max_tokens == 12 else 2)


def test_a_comparison_too_long_shifts_no_other(tokenizer, words):
    # Public code cut from the right, lost the choice slot of long texts, and read later labels in its place.
    long = compare("w0", first=" ".join(["long"] * 30))
    encoded = encode_choice(tokenizer, CHOICE, [compare("w1"), long, compare("w2")], max_tokens=12)
    assert encoded.both_kept().tolist() == [True, False, True]
    assert words(tokenizer, encoded.table[4]) == "<s> POST: w2 A: x B: y z CHOICE:"
    assert all(encoded.table[row][-1] == encoded.table[0][-1] for row in (0, 1, 4, 5))


def test_choices_that_are_not_one_token_are_refused(tokenizer, words):
    with pytest.raises(ValueError, match=r"' yes' and ' no'.*differ in the last token only. Set choices="):
        choice_ids(tokenizer, CHOICE, ("yes", "no"))  # both unknown, thus the same token
    with pytest.raises(ValueError, match=r"differ in the last token only"):
        choice_ids(tokenizer, CHOICE, ("A", "B b"))
    for choices in (("A", "B"), ("a", "b")):
        assert words(tokenizer, choice_ids(tokenizer, CHOICE, choices)) == " ".join(choices)


def byte_tokenizer(merges=()):
    """One token per byte, blanks marked, but for the merges."""
    alphabet = sorted(ByteLevel.alphabet())
    tokens = ["</s>", *alphabet, *("".join(pair) for pair in merges)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocabulary, list(merges)))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def test_lopsided_letters_are_refused():
    # Some vocabularies have " B" as one token and " A" as two: then the places of the choice differ.
    with pytest.raises(ValueError, match=r"Set choices=\['A', 'B'\] to other words"):
        choice_ids(byte_tokenizer([("Ġ", "B")]), CHOICE)
    even = choice_ids(byte_tokenizer(), CHOICE)
    assert even[1] - even[0] == 1  # the bytes of A and B


def test_cutting_does_not_split_characters():
    tokenizer = byte_tokenizer()
    (fitted,) = fit_texts(tokenizer, [Parts("P: ", "aüü", " E")], max_tokens=8)
    # Ten bytes: 3 + 1 + 2 + 2 + 2. The last ü goes as a whole.
    assert fitted.parts.text == "P: aü E"
    assert len(fitted.ids) == 8


def test_texts_that_cannot_fit_and_blank_posts(tokenizer):
    texts = [Parts("w0 w1 w2", "", ""), Parts("w0 ", "w1", " w2 w3"), Parts("w0 ", "w1 w2", "")]
    fitted = list(fit_texts(tokenizer, texts, max_tokens=2))
    assert fitted[:2] == [None, None]
    assert fitted[2].parts.text == "w0 w1"


def test_response_border_in_a_byte_tokenizer_is_where_the_prompt_alone_ends():
    tokenizer = byte_tokenizer()
    encoded = encode_responses(tokenizer, ANSWER, [{"post": "äö"}], ["üx"], max_tokens=99)
    prompt = tokenizer("POST: äö ANSWER:", add_special_tokens=False)["input_ids"]
    assert encoded.table[0][: encoded.marks[0]].tolist() == prompt
    assert tokenizer.decode(encoded.table[0][encoded.marks[0] :].tolist()) == " üx</s>"


def test_chosen_and_rejected_see_the_same_cut_prompt(tokenizer, words):
    fields = [{"post": "w0 w1 w2 w3"}] * 2
    encoded = encode_responses(tokenizer, ANSWER, fields, ["x", "x y z"], max_tokens=8, pairs=True)
    # <s> POST: ANSWER: and </s> are 4, the longer response 3: one word of the post is left, in both.
    assert words(tokenizer, encoded.table[0]) == "<s> POST: w0 ANSWER: x </s>"
    assert words(tokenizer, encoded.table[1]) == "<s> POST: w0 ANSWER: x y z </s>"
    assert encoded.marks.tolist() == [4, 4]
    alone = encode_responses(tokenizer, ANSWER, fields[:1], ["x"], max_tokens=8)
    assert words(tokenizer, alone.table[0]) == "<s> POST: w0 w1 w2 ANSWER: x </s>"


PAIR = Template("{post}", trim="post")


def test_pair_form(pair_tokenizer, words):
    encoded = encode_pair(pair_tokenizer, PAIR, [compare("w0 w1")], max_tokens=99)
    assert words(pair_tokenizer, encoded.table[0]) == "[CLS] w0 w1 [SEP] x [SEP] y z [SEP]"
    assert words(pair_tokenizer, encoded.table[1]) == "[CLS] w0 w1 [SEP] y z [SEP] x [SEP]"
    assert encoded.marks.tolist() == [6, 7]
    without = encode_pair(pair_tokenizer, Template(""), [compare("w0")], max_tokens=99)
    assert words(pair_tokenizer, without.table[0]) == "[CLS] x [SEP] y z [SEP]"


@pytest.mark.parametrize(
    ("max_tokens", "text"), [(8, "[CLS] w0 [SEP] x [SEP] y z [SEP]"), (7, "[CLS] x [SEP] y z [SEP]")]
)
def test_pair_form_cuts_the_prompt_first(pair_tokenizer, words, max_tokens, text):
    encoded = encode_pair(pair_tokenizer, PAIR, [compare("w0 w1")], max_tokens)
    assert words(pair_tokenizer, encoded.table[0]) == text
    assert encoded.trimmed == 2


def test_pair_form_cuts_answers_only_if_told(pair_tokenizer, words):
    long = [compare("w0", "x", "y z q r")]
    assert encode_pair(pair_tokenizer, PAIR, long, max_tokens=6).both_kept().tolist() == [False]
    cut = encode_pair(pair_tokenizer, PAIR, long, max_tokens=6, truncate_answers=True)
    assert words(pair_tokenizer, cut.table[0]) == "[CLS] x [SEP] y z [SEP]"
    assert words(pair_tokenizer, cut.table[1]) == "[CLS] y z [SEP] x [SEP]"


def test_pair_form_equals_the_tokenizer_s_own_pair(pair_tokenizer):
    encoded = encode_pair(pair_tokenizer, Template(""), [compare("", "x y", "z")], max_tokens=99)
    own, ids = pair_tokenizer("x y", "z"), encoded.table[0]
    assert ids.tolist() == own["input_ids"]
    assert (np.arange(len(ids)) >= encoded.marks[0]).astype(int).tolist() == own["token_type_ids"]


def test_a_tokenizer_without_separator_or_end_is_refused():
    bare = byte_tokenizer()
    bare.eos_token = None
    with pytest.raises(ValueError, match=r"form=pair needs a tokenizer with a sep_token"):
        encode_pair(bare, PAIR, [compare("w0")], max_tokens=9)
    with pytest.raises(ValueError, match=r"has no eos_token, so a response has no end"):
        pad_id(bare)


def test_a_tokenizer_that_is_not_there():
    with pytest.raises(OSError, match=r"tokenizer='./none': there is no such folder; give a folder") as error:
        load_tokenizer("./none")
    assert "\n" not in str(error.value)
