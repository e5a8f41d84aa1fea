import json

import numpy as np
import pytest
from tiny_world import read_lines, table, write_rows

from fedlight.datamodules.rows.rows import RowsError
from fedlight.judges.judge_agreement import judge_agreement, read_pairs
from fedlight.recipes import recipe as recipes

COLUMNS = {"prompt": "prompts", "response_a": "answers_a", "response_b": "answers_b", "choice": "winner"}
COLUMNS |= {"client": "judge", "category": "category"}
CHOICES = {"a": "model_a", "b": "model_b", "tie": ["tie", "tie (inconsistent)"]}
LONGER = {"class_path": "LengthJudge"}


def vote(question, category, judge, a, b, winner):
    row = {"question_id": question, "category": category, "judge": judge}
    return row | {"prompts": [f"Question {question}?"], "answers_a": [a], "answers_b": [b], "winner": winner}


VOTES = [
    vote(1, "math", "ann", "long answer", "short", "model_a"),
    vote(1, "math", "ben", "short", "long answer", "model_b"),  # the same pair in the other order
    vote(1, "math", "cyd", "long answer", "short", "tie"),
    vote(1, "math", "ann", "short", "long answer", "model_a"),  # has voted on it already
    vote(2, "math", "ann", "four", "two", "model_b"),
    vote(3, "art", "ann", "one", "and more", "tie (inconsistent)"),
    vote(3, "art", "ben", "same", "same", "tie"),  # nothing to compare
    vote(3, "art", "ben", "long one", "no", "model_a"),
]


@pytest.fixture
def file(tmp_path):
    return write_rows(tmp_path / "votes.jsonl", VOTES)


def test_votes_on_one_pair_are_gathered(file):
    pairs, counts = read_pairs(file, COLUMNS, CHOICES, "question_id")
    assert [(pair.first, pair.second, pair.votes) for pair in pairs] == [
        ("long answer", "short", [1, 1, 0.5]),
        ("four", "two", [0]),
        ("one", "and more", [0.5]),
        ("long one", "no", [1]),
    ]
    assert [pair.question + pair.category for pair in pairs] == ["1math", "2math", "3art", "3art"]
    assert pairs[0].fields == {"prompt": "Question 1?"}
    assert read_pairs(file, COLUMNS, CHOICES)[0][3].question == "Question 3?"
    assert (counts.rows, counts.votes, counts.pairs, counts.repeated) == (8, 6, 4, 3)
    assert (counts.identical, counts.second_votes, counts.changed) == (1, 1, 1)


def test_an_empty_answer_is_an_answer(tmp_path):
    votes = [
        vote(1, "math", "ann", "an answer", "", "model_a"),
        vote(1, "math", "ben", "", "an answer", "model_a"),
        vote(2, "math", "ann", "", "", "tie"),  # nothing to compare
        vote(2, "math", "ann", "long one", "no", "model_a"),
    ]
    file = write_rows(tmp_path / "votes.jsonl", votes)
    done = judge_agreement(file, {"longer": LONGER}, COLUMNS, CHOICES, str(tmp_path / "out"), "question_id")
    records = read_lines(tmp_path / "out/verdicts.jsonl")
    told = [tuple(own[name] for name in ("first", "second", "votes", "ours_first")) for own in records]
    assert told == [("an answer", "", [1, 0], 1), ("long one", "no", [1], 1)]
    counts = json.loads((tmp_path / "out/counts.json").read_text())
    assert done["counts"] == counts
    assert (counts["rows"], counts["votes"], counts["on_empty"], counts["identical"]) == (4, 3, 2, 1)
    (row,) = done["rows"]
    assert (row["pairs"], row["votes"], row["votes_left_out"]) == (2, 3, 1)
    assert "2 of these votes are on a pair with an empty answer" in done["report"]


def test_nobody_has_two_votes_on_a_pair_but_those_who_give_no_name(tmp_path):
    votes = [
        vote(1, "math", "ann", "one", "two", "model_a"),
        vote(1, "math", "ann", "two", "one", "model_b"),  # says the same
        vote(1, "math", "ann", "one", "two", "tie"),  # has changed its mind
        vote(1, "math", "", "one", "two", "model_b"),
        vote(1, "math", "", "one", "two", "model_b"),
        vote(2, "math", "ann", "one", "two", "model_b"),  # another question: another pair
        vote(2, "art", "ann", "one", "two", "tie"),  # in another category
    ]
    pairs, counts = read_pairs(write_rows(tmp_path / "votes.jsonl", votes), COLUMNS, CHOICES, "question_id")
    assert [pair.votes for pair in pairs] == [[1, 0, 0], [0], [0.5]]
    assert (counts.second_votes, counts.changed, counts.unnamed, counts.repeated) == (2, 1, 2, 4)


@pytest.mark.parametrize("limit", [None, 7])
def test_the_counts_add_up_to_the_rows_read(tmp_path, limit):
    """Against a plain loop: each row has one fate, by votes and by pairs; no pair that was shown goes without a reason."""
    stream = np.random.default_rng(3)
    votes = [
        vote(
            int(stream.integers(3)),
            str(stream.choice(["", "math"])),
            str(stream.choice(["", "ann", "ben"])),
            *(str(text) for text in stream.choice(["", "a", "bb"], 2)),
            str(stream.choice(["model_a", "model_b", "tie"])),
        )
        for _ in range(120)
    ]
    file = write_rows(tmp_path / "votes.jsonl", votes)
    pairs, counts = read_pairs(file, COLUMNS, CHOICES, "question_id", limit)
    assert counts.rows == 120 == counts.votes + counts.identical + counts.second_votes + counts.not_drawn
    assert counts.rows == counts.pairs + counts.pairs_not_drawn + counts.repeated + counts.identical

    identical, seen, people, second, nameless = 0, set(), set(), 0, 0
    for row in votes:
        (a,), (b,) = row["answers_a"], row["answers_b"]
        if a == b:
            identical += 1
            continue
        pair = (row["question_id"], row["category"], min(a, b), max(a, b))
        seen.add(pair)
        second += row["judge"] != "" and (*pair, row["judge"]) in people
        people.add((*pair, row["judge"]))
        nameless += row["judge"] == ""
    assert (counts.identical, counts.second_votes) == (identical, second)
    assert counts.pairs + counts.pairs_not_drawn == len(seen) > 7
    assert counts.votes == sum(len(pair.votes) for pair in pairs)
    assert counts.pairs == len(pairs) == (limit or len(seen))
    if limit is None:
        assert counts.unnamed == nameless
        assert counts.not_drawn == 0 < counts.on_empty

    settings = ({"longer": LONGER}, COLUMNS, CHOICES, str(tmp_path / "out"), "question_id", limit)
    done = judge_agreement(file, *settings)
    assert done["counts"]["rows"] == 120
    every, *categories = table(tmp_path / "out/agreement.csv")
    assert [line["category"] for line in categories] == ["(none)", "math"]
    reasons = ("pairs", "unread_pairs", "no_verdict", "no_vote", "no_majority")
    for ending in ("", "_decided"):
        assert sum(int(every[f"{name}{ending}"]) for name in reasons) == int(every["shown"]) == counts.pairs
        assert int(every[f"votes{ending}"]) + int(every[f"ties{ending}"]) == counts.votes
    for name in ("shown", "votes", "ties_decided", *reasons):
        assert sum(int(line[name]) for line in categories) == int(every[name])


def test_the_report_shows_the_ten_largest_categories(tmp_path):
    votes = [
        vote(f"{category} {n}", f"topic {category:02}", "ann", "one", "longer", "model_b")
        for category in range(13)
        for n in range(9 + category)
    ]
    file = write_rows(tmp_path / "votes.jsonl", votes)
    done = judge_agreement(file, {"longer": LONGER}, COLUMNS, CHOICES, str(tmp_path / "out"), "question_id")
    shown = [f"topic {category:02}" for category in range(12, 2, -1)]
    shares, counts = (part.split("┡")[1] for part in done["report"].split("longer")[1:])
    for text in (shares, counts):
        assert [words for words in shown if words in text] == shown
        assert text.index(shown[0]) < text.index(shown[-1])
        assert not any(f"topic {category:02}" in text for category in (0, 1, 2))
    assert "3 more categories are in agreement.csv." in done["report"]
    assert len(table(tmp_path / "out/agreement.csv")) == 14


def test_a_judge_against_people_by_category(file, tmp_path):
    done = judge_agreement(file, {"longer": LONGER}, COLUMNS, CHOICES, str(tmp_path / "out"), "question_id")
    (row,) = done["rows"]
    assert row["method"] == "longer"
    assert row["majority"] == 2 / 4  # the first and the last pair
    assert row["vote"] == pytest.approx((2 / 3 + 0 + 0 + 1) / 4)
    assert row["people"] == pytest.approx(1 / 3)
    assert row["majority_decided"] == pytest.approx(2 / 3)
    assert row["people_decided"] == 1
    assert (row["order_changed"], row["prefers_first"], row["unread"]) == (0, 0.5, 0)
    lines = table(tmp_path / "out/agreement.csv")
    assert {line["category"]: line["pairs"] for line in lines} == {"all": "4", "art": "2", "math": "2"}
    assert {line["judge"] for line in lines} == {"longer"}
    assert float(lines[2]["vote"]) == pytest.approx(1 / 3)
    assert lines[1]["people"] == ""  # nobody there has company
    assert "longer, against people" in done["report"]
    first = read_lines(tmp_path / "out/verdicts.jsonl")[0]
    assert (first["votes"], first["ours_first"], first["ours_second"]) == ([1, 1, 0.5], 1, 1)


def test_what_does_not_fit_is_named(file, tmp_path):
    for columns, choices, why in (
        ({**COLUMNS, "client": "who"}, CHOICES, "no column 'who'"),
        ({name: at for name, at in COLUMNS.items() if name != "client"}, CHOICES, "columns has no 'client'"),
        (COLUMNS, {**CHOICES, "tie": "tie"}, r"row 6: the choice 'tie \(inconsistent\)' is none of choice_v"),
    ):
        with pytest.raises(RowsError, match=why):
            judge_agreement(file, {"longer": LONGER}, columns, choices, str(tmp_path / "out"))
    with pytest.raises(ValueError, match=r"judges=\{'longer': None\} names nobody"):
        judge_agreement(file, {"longer": None}, COLUMNS, CHOICES, str(tmp_path / "out"))
    with pytest.raises(ValueError, match="limit=-1 must be at least 1"):
        judge_agreement(file, {"longer": LONGER}, COLUMNS, CHOICES, str(tmp_path / "out"), limit=-1)
    same = write_rows(tmp_path / "same.jsonl", [VOTES[6]])
    with pytest.raises(RowsError, match="no row has two different answers"):
        read_pairs(same, COLUMNS, CHOICES)


def test_the_recipe_judges_a_sample(tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    votes = [
        vote(question, category, judge, "a b c d", f"e {question}", winner)
        for question, category in ((1, "math"), (2, "art"), (3, "math"))
        for judge, winner in (("ann", "model_a"), ("ben", "model_b"), ("cyd", "model_a"))
    ]
    file = write_rows(tmp_path / "votes.jsonl", votes)
    changes = [f"votes={file}", f"model={tiny_model}", "chat=false", "limit=2"]
    changes.append("judges.local.init_args.most_words=9")
    results = recipes.run("mt_judges", output=tmp_path / "out", overrides=changes)
    longer, local = results["rows"]
    assert (longer["method"], longer["majority"], longer["people"]) == ("longer", 1, pytest.approx(1 / 3))
    assert local["unread"] == 0
    assert len(read_lines(tmp_path / "out/seed0/agreement/verdicts.jsonl")) == 4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"a": [1, "x"], "b": 2, "tie": "x"}, "choice_values gives 'x' two meanings"),
        ({"a": 1, "B": 2}, "choice_values has the key 'B'"),
    ],
)
def test_a_value_of_the_choice_has_one_meaning(tmp_path, values, message):
    row = {"response_a": "r", "response_b": "s", "choice": "1", "client": "p"}
    with pytest.raises(ValueError, match=message):
        read_pairs(write_rows(tmp_path / "votes.jsonl", [row]), {name: name for name in row}, values)
