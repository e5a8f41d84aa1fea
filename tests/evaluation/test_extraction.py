import math
import random

import pytest

from fedlight.datamodules.text.templates import ALPACA, ALPACA_NO_INPUT, Template
from fedlight.evaluation.extraction import (
    are_written,
    compare_with_all,
    exposure,
    opening_of,
    recalls,
    round_robin,
)


def test_what_a_sample_is_most_like_and_what_is_exact():
    _, [record] = compare_with_all(["a planet please"], ["name a planet", "add two numbers", "a planet"])
    assert record["mean"] == pytest.approx((2 / 3 + 0 + 4 / 5) / 3)
    assert record["best"] == pytest.approx(4 / 5)
    assert (record["nearest"], record["exact"]) == ("a planet", False)
    texts = [" add\ntwo  numbers ", "Add two numbers", "add two numbers ."]
    _, records = compare_with_all(texts, ["add two numbers"])
    assert [record["exact"] for record in records] == [True, False, False]
    assert [record["best"] for record in records] == [1.0, 1.0, 1.0]  # ROUGE sees neither case nor marks


def test_extraction_of_samples_by_hand_and_of_copies():
    texts, references = ["a b", "c d", "a  b", "x"], ["a b", "c e", "f g", "a b"]
    metrics, _ = compare_with_all(texts, references)
    # Rows of the table of pairs: 1 0 0 1; 0 .5 0 0; 1 0 0 1; 0 0 0 0. Extracted is "a b" of three different ones.
    expected = {"rouge_l": 4.5 / 16, "rouge_l_best": 2.5 / 4, "exact": 0.5, "extracted": 1 / 3}
    assert metrics == pytest.approx(expected)
    references = [f"{letter} {letter}x {letter}y" for letter in "abcdefghij"]
    metrics, _ = compare_with_all(references, references)
    assert metrics["rouge_l"] == pytest.approx(0.1)
    assert metrics["rouge_l_best"] == metrics["exact"] == metrics["extracted"] == 1


def test_recalls_by_hand_and_secrets_in_whole_words():
    one, other = recalls(["the cat  sat", "a mat"], ["the cat sat", "the cat on a mat"])
    assert one == {"rouge_l": 1, "exact": True}
    assert other == {"rouge_l": pytest.approx(4 / 7), "exact": False}
    for text, is_there in (("it is 4 8\n1 5 .", True), ("It is 4 8 1 5.", True), ("4 8 x 1 5", False)):
        assert are_written(["4 8\n1 5"], ["no", text]) == [is_there]
    assert are_written(["4 8 1 5"], ["14 8 1 5", "4 8 1 50", ""]) == are_written(["4 8 1 5"], []) == [False]


@pytest.mark.parametrize("text", ["苹果 2 梨", "Иван Петров, 1987"])
def test_texts_in_other_scripts_are_told(text):
    with pytest.warns(UserWarning, match="some texts are in other scripts: .* read `exact`"):
        assert recalls([text], [text])[0]["exact"]
    with pytest.warns(UserWarning, match="some texts are in other scripts"):
        compare_with_all(["a"], ["a", text])


def test_exposure_is_the_rank_among_all_candidates():
    draw = random.Random(0)
    others = [draw.gauss(0, 1) for _ in range(255)]
    for value in (-9.0, 0.1, 9.0):
        rank = sorted([*others, value], reverse=True).index(value) + 1
        assert exposure(value, others) == pytest.approx(math.log2(256 / rank))
    assert exposure(9.0, others) == 8
    assert exposure(-9.0, others) == 0
    assert (
        exposure(1.0, [1.0]) == exposure(math.nan, [1.0]) == exposure(1.0, [math.nan]) == 0
    )  # no better than another


def test_clients_take_turns():
    rows = {"a": list(range(5)), "b": [10], "c": [20, 21], "d": []}
    turns = round_robin(rows, 6, seed=0)
    assert sorted(client for client, _ in turns[:3]) == ["a", "b", "c"]
    assert sorted(client for client, _ in turns[3:5]) == ["a", "c"]
    assert len(set(turns)) == len(turns) == 6
    assert sorted(round_robin(rows, 99, seed=0)) == [(c, row) for c, own in rows.items() for row in own]
    assert round_robin(dict(reversed(rows.items())), 6, seed=0) == turns
    assert len({tuple(round_robin(rows, 6, seed)) for seed in range(9)}) > 5
    assert round_robin({}, 3, seed=0) == []


def test_both_forms_of_alpaca_and_the_joined_one_of_figure_8_of_feddca():
    opening = opening_of([ALPACA, ALPACA_NO_INPUT])
    assert [prefix.splitlines()[-1] for prefix in opening.prefixes] == ["### Instruction:"] * 2
    assert all(prefix.endswith("### Instruction:\n") for prefix in opening.prefixes)
    assert opening.stops == ("### Input:", "### Response:")
    template = Template.named("alpaca")
    for row in ({"instruction": "Add.\nNow.", "input": "1 2"}, {"instruction": "Add.\nNow.", "input": ""}):
        assert opening.body(template.render(row).text) == "Add.\nNow."
    template = Template.named("alpaca_joined")
    opening = opening_of([template.text, template.without.text])
    assert opening.prefixes == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request."
        "\n\n### Instruction:\n",
    )
    row = {"instruction": "Add.", "input": "1 2"}
    assert opening.body(template.render(row).text) == "Add. 1 2"


def test_templates_of_one_line_and_with_braces():
    opening = opening_of(["{{x}} Q: {prompt}"])
    assert opening == (("{x} Q:",), ())
    assert opening.body("{x} Q: how {old}?") == "how {old}?"
    assert opening_of(["A {a}\n \n{b} B {c} C"]).stops == ("B",)
    assert opening_of(["A {a} X", "A {a} Y"]) == (("A",), ("X", "Y"))


@pytest.mark.parametrize("text", ["{instruction}\nAnswer:", " {a} b", "no slot at all"])
def test_templates_that_give_nothing_to_begin_with(text):
    with pytest.raises(ValueError, match="has no text in front of its first slot"):
        opening_of([text])
