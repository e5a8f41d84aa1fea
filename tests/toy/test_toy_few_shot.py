import hashlib
import json
from collections import Counter

import pytest

from fedlight.generators.toy_teacher import topic_of
from fedlight.toy import MODEL, rows
from fedlight.toy.instructions import DOMAINS, answer, topics
from fedlight.toy.writing import known_topics


def digest(found: list[dict[str, str]]) -> str:
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]


@pytest.fixture(scope="module")
def exercises() -> list[dict[str, str]]:
    return rows("writing", size=300, known=12)


def test_rows_of_the_defaults_are_those_that_they_were() -> None:
    """As before there was an option to join instruction and input, by the rows' digest."""
    assert digest(rows("instructions", split="private")) == "a40ac72c7cf52a24"
    assert digest(rows("instructions", split="test")) == "3a78c0668e591dd3"


def test_a_joined_question_says_the_same_in_one_slot() -> None:
    for split in ("private", "test"):
        apart = rows("instructions", split=split, client_rows=9, topic_rows=1)
        joined = rows("instructions", split=split, client_rows=9, topic_rows=1, joined="1")
        assert len(joined) == len(apart)
        for one, other in zip(joined, apart, strict=True):
            assert one == {**other, "instruction": f"{other['instruction']} {other['input']}", "input": ""}


def test_every_other_exercise_is_to_write_a_question_of_the_domain_of_those_that_are_shown(exercises) -> None:
    for row in exercises[::2]:
        *shown, last = row["instruction"].split("\n")
        assert last == "POST :"
        assert len(shown) <= 8
        domain, (area, _) = topic_of(row["output"])
        assert area in DOMAINS[domain].areas
        assert {topic_of(text)[0] for text in shown} <= {domain}
    most_near = [row for row in exercises[::2] if "\n" in row["instruction"]]
    near = [topic_of(row["output"])[1][0] in row["instruction"] for row in most_near]
    assert 0.7 < sum(near) / len(near) < 1


def test_the_others_tell_the_answers_to_the_known_topics_alone(exercises) -> None:
    known = known_topics(0, "kitchen", 12)
    assert len(set(known)) == 12
    assert set(known) < set(topics("kitchen"))
    told = {topic_of(row["instruction"].removesuffix("\nCHOICE :")): row["output"] for row in exercises[1::2]}
    assert told == {("kitchen", topic): answer(0, "kitchen", topic) for topic in known}


def test_without_known_topics_there_are_no_answers() -> None:
    assert all(row["instruction"].endswith("POST :") for row in rows("writing", size=40))


def test_exercises_show_no_text_of_the_test_or_of_a_client(exercises) -> None:
    texts = {text.removeprefix("POST : ") for row in exercises for text in row["instruction"].split("\n")}
    texts |= {row["output"] for row in exercises}
    for split in ("test", "private"):
        asked = {row["instruction"] for row in rows("instructions", split=split, joined=1)}
        assert not asked & texts


def test_the_tokenizer_knows_every_word_and_the_longest_fits(exercises) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ids = [tokenizer(f"{row['instruction']} {row['output']}")["input_ids"] for row in exercises]
    assert not any(tokenizer.unk_token_id in row for row in ids)
    assert max(map(len, ids)) < 160  # max_tokens of toy_writer.yaml


def test_exercises_are_a_function_of_the_options() -> None:
    first, again, other = (rows("writing", size=20, seed=seed) for seed in (3, "3", 4))
    assert first == again != other
    assert all(len(row["instruction"].split("\n")) == 1 for row in rows("writing", size=20, questions=0))


def test_unseen_rows_can_be_of_topics_as_often_as_clients_hold_them() -> None:
    private = rows("instructions", client_rows=30)
    unseen = rows("instructions", split="test", client_rows=30, held=1)
    assert Counter(row["topic"] for row in unseen) == Counter(row["topic"] for row in private)
    own, others = ({(row["instruction"], row["input"]) for row in some} for some in (private, unseen))
    assert len(others) == len(unseen)
    assert not own & others
    assert unseen == rows("instructions", split="test", client_rows=30, held="1", topic_rows=3)


def test_clients_ask_for_questions_beside_their_own_rows() -> None:
    """The further rows leave the others as they are; their questions are of the client's areas and of no other split."""
    options = {"rule": 1, "client_rows": 30, "joined": 1}
    plain, more = rows("instructions", **options), rows("instructions", **options, written=6)
    assert [row for row in more if row["topic"] != "writing"] == plain
    asking = [row for row in more if row["topic"] == "writing"]
    assert Counter(row["client"] for row in asking) == {f"c{index}": 6 for index in range(10)}
    others = (rows("instructions", split=split, **options) for split in ("test", "public"))
    elsewhere = {row["instruction"] for split in others for row in split}
    for row in asking:
        own = {one["instruction"]: one["topic"].split()[0] for one in plain if one["client"] == row["client"]}
        *shown, request = row["instruction"].split("\nPOST : ")
        assert request == "YOUR POST ?"
        assert len(shown) == 2
        assert row["output"].split()[-1] in {own[text] for text in shown}  # a question ends with its area
        assert row["output"] not in elsewhere


def test_an_exercise_can_ask_for_a_question_as_clients_do() -> None:
    plain, instructed = rows("writing", size=40), rows("writing", size=40, instructed=1)
    asked = [{**row, "instruction": f"{row['instruction']} YOUR POST ?\nCHOICE :"} for row in plain]
    assert instructed == asked
