import random

import numpy as np
import pytest
from rouge_score.rouge_scorer import RougeScorer

from fedlight.evaluation.rouge_l import KnownTexts, pairwise_rouge_l, rouge_l_of_pairs

WORDS = "the a planet star name write poem add two numbers".split()  # noqa: SIM905


def rouge_l(reference, text):
    return pairwise_rouge_l([text], [reference]).item()


def texts(number, words, seed=0):
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, words))) for _ in range(number)]


@pytest.mark.parametrize("limit", [0.0, 0.4, 0.7, 1.0])
def test_near_finds_the_first_that_exceeds_the_limit(limit):
    known, seen, found = KnownTexts(limit), [], 0
    for text in texts(60, 7):
        expected = next((one for one in seen if rouge_l(one, text) > limit), None)
        assert known.near(text) == expected
        found += expected is not None
        known.add(text)
        seen.append(text)
    assert (found == 0) == (limit == 1.0)


def test_the_limit_repeated_words_and_texts_without_words_by_hand():
    known = KnownTexts(limit=0.5)
    known.add("b a")
    assert known.near("a b") is None  # 0.5
    assert known.near("b a c") == "b a"  # 0.8
    known = KnownTexts(limit=0.5)
    known.add("very very very very")
    assert known.near("very") is None  # 2 * 1 / 5
    assert known.near("very very") == "very very very very"  # 2 * 2 / 6
    known = KnownTexts(limit=0.0)
    known.add("你好")
    known.add("")
    assert known.near("你好") is None
    assert known.near("") is None
    assert KnownTexts(0.7).near("a b") is None
    assert not KnownTexts(0.7).overlaps("a b c d e")
    known = KnownTexts(limit=0.7)
    known.add("你好 AI 你好")
    assert not known.overlaps("They say that AI will do it.")


@pytest.mark.parametrize(
    ("text", "overlaps"),
    [
        ("x y z a b c d e x y z", True),  # all of the known one, amid as many other words
        ("x y z a b c d x x y z", True),  # 2 * 4 / (5 + 5)
        ("x y z a b c x x x y z", False),  # 2 * 3 / (5 + 5)
        ("a x x x b x x x c x x x d x x x e", False),  # all of it, but in no part of five words
        ("a b c d", False),  # fewer words than make a part
    ],
)
def test_a_part_of_a_text_is_near_a_shorter_one_whichever_is_known(text, overlaps):
    for one, other in ((text, "a b c d e"), ("a b c d e", text)):
        known = KnownTexts(limit=0.7)
        known.add(one)
        assert known.overlaps(other) is overlaps
    known = KnownTexts(limit=1.0)
    known.add(text)
    assert not known.overlaps(text)


def test_all_pairs_equal_rouge_score_to_the_last_bit():
    ours, theirs = texts(30, 70), texts(20, 70, seed=1)
    ours[:4] = ["", "...", "你好", "The a-planet, THE planet's 2 stars!"]
    theirs[:3] = ["the planet s 2", "", ours[9]]
    scorer = RougeScorer(["rougeL"])
    expected = [[scorer.score(known, text)["rougeL"].fmeasure for known in theirs] for text in ours]
    assert pairwise_rouge_l(ours, theirs).tolist() == expected
    assert rouge_l_of_pairs(ours[:20], theirs).tolist() == [expected[at][at] for at in range(20)]
    assert np.count_nonzero(expected) > 400
    assert expected[9][2] == 1
    assert rouge_l("The cat sat on the mat.", "the cat on a mat") == pytest.approx(8 / 11)


def test_equal_texts_are_compared_once_and_pairs_have_one_reference_each():
    table = pairwise_rouge_l(["a b", "a", "a b"], ["b", "a b", "b"])
    assert table[0] == pytest.approx([2 / 3, 1, 2 / 3])
    assert table.tolist()[2] == table.tolist()[0]
    assert table.shape == (3, 3)
    assert pairwise_rouge_l([], ["a"]).shape == (0, 1)
    assert rouge_l_of_pairs([], []).tolist() == []
    with pytest.raises(ValueError, match="shorter"):
        rouge_l_of_pairs(["a", "b"], ["a"])
