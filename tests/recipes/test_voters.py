from collections import Counter

import pytest
from tiny_world import read_lines, write_rows

from fedlight.datamodules.rows.exclusion import Holdout
from fedlight.datamodules.rows.rows import RowsError
from fedlight.recipes.voters import sample_voters, snippet_pairs

DECIDED = {  # voter -> decided votes on what is trained on, and on what is held out
    "ann": (5, 3),
    "bob": (4, 2),
    "cid": (3, 9),  # one too few to train on
    "dan": (9, 1),  # one too few to be tested
    "eve": (4, 4),
    "fay": (0, 6),
    "gil": (6, 0),
}
ROWS = [
    {"who": who, "topic": topic, "pick": "left", "text": f"{who} {topic} {number}"}
    for who, counts in DECIDED.items()
    for topic, count in zip(("cats_yes", "dogs_no"), counts, strict=True)
    for number in range(count)
]
TIES = [  # would make cid and dan eligible, if they counted
    {"who": who, "topic": topic, "pick": pick, "text": f"tie {pick}"}
    for who, topic in (("cid", "cats_yes"), ("dan", "dogs_no"))
    for pick in ("both", "neither")
]


@pytest.fixture
def sample(tmp_path):
    """Draws voters; returns what the stage returned, the votes to train on and those to test on."""

    def draw(num_clients=3, seed=0, rows=ROWS + TIES, held_out=("dogs_*",), **changes):
        files = {side: tmp_path / f"{side}{seed}.jsonl" for side in ("train", "test")}
        settings = {"client": "who", "choice": "pick", "ties": ["both", "neither"]}
        settings |= {"min_train": 4, "num_test": 2}
        done = sample_voters(
            source=write_rows(tmp_path / "votes.jsonl", rows),
            holdout=Holdout("topic", [*held_out]),
            num_clients=num_clients,
            seed=seed,
            **{side: str(file) for side, file in files.items()},
            **settings | changes,
        )
        return done, *map(read_lines, files.values())

    return draw


def test_all_that_is_not_held_out_is_trained_on_and_no_vote_is_on_both_sides(sample):
    done, train, test = sample()
    assert done == {"eligible": 3, "train": 5 + 4 + 4, "test": 3 * 2}
    assert Counter(row["who"] for row in train) == {"ann": 5, "bob": 4, "eve": 4}
    assert Counter(row["who"] for row in test) == {"ann": 2, "bob": 2, "eve": 2}
    assert {row["text"] for row in train if row["who"] == "ann"} == {f"ann cats_yes {i}" for i in range(5)}
    _, train, test = sample()
    assert all(row in ROWS for row in train + test)
    assert {row["topic"] for row in train} == {"cats_yes"}
    assert {row["topic"] for row in test} == {"dogs_no"}
    texts = [row["text"] for row in train + test]
    assert len(set(texts)) == len(texts)


def test_ties_are_left_out(sample):
    _, train, test = sample()
    assert {row["pick"] for row in train + test} == {"left"}
    # "both" decides, now cid has four votes and dan two held-out ones
    done, train, _ = sample(ties=["neither"])
    assert done["eligible"] == 5
    done, train, _ = sample(5, ties=["neither"])
    assert sum(row["pick"] == "both" for row in train) == 1


def test_too_few_voters_and_no_held_out_value_are_errors_that_name_the_settings(sample):
    with pytest.raises(RowsError, match=r"3 voters have 4 votes .* and 2 held-out ones, .* num_clients=4"):
        sample(4)
    with pytest.raises(RowsError, match=r"1 voters have 5 votes .* Lower one of the three"):
        sample(2, min_train=5)
    with pytest.raises(RowsError, match=r"'birds_\*' occurs in no row. topic has: cats_yes, dogs_no"):
        sample(held_out=["birds_*"])


@pytest.mark.parametrize("numbers", [{"num_clients": 0}, {"num_clients": -1}, {"num_test": -1}])
def test_numbers_of_voters_and_votes_out_of_range_are_refused(sample, numbers):
    with pytest.raises(ValueError, match=r"num_\w+=-?\d must be at least"):
        sample(**numbers)


def test_the_draws_are_a_function_of_the_seed_and_of_no_order_of_rows(sample):
    again = [sample(1, seed=seed) for seed in (7, 7)]
    assert again[0] == again[1]
    drawn = {tuple(row["text"] for row in sample(1, seed=seed)[2]) for seed in range(12)}
    assert {texts[0].split()[0] for texts in drawn} == {"ann", "bob", "eve"}
    assert len({texts for texts in drawn if texts[0].startswith("eve")}) > 1  # which two of four votes
    for seed in range(4):
        both = (ROWS, ROWS[::-1])
        chosen, turned = ({row["who"] for row in sample(2, seed=seed, rows=rows)[2]} for rows in both)
        assert chosen == turned


LONG = [
    {
        "topic": topic,
        "one": " ".join(f"{topic}{i}" for i in range(30)),
        "two": [" ".join(["word"] * 20), " ".join(["more"] * 20)],  # turns of a conversation
    }
    for topic in ("cats", "dogs")
]


def snippets(tmp_path, rows=LONG, **changes):
    settings = {"texts": ["one", "two"], "holdout": Holdout("topic", ["dogs"]), "num_pairs": 60, "seed": 0}
    output, source = tmp_path / "pairs.jsonl", write_rows(tmp_path / "rows.jsonl", rows)
    snippet_pairs(source=source, output=str(output), **settings | changes)
    return read_lines(output)


def test_snippets_begin_a_text_and_the_longer_one_is_to_be_chosen(tmp_path):
    pairs = snippets(tmp_path)
    lengths = [[len(pair[name].split()) for name in ("response_a", "response_b")] for pair in pairs]
    assert len(pairs) == 60
    assert [pair["choice"] for pair in pairs] == ["a" if a > b else "b" for a, b in lengths]
    assert all(4 <= min(both) < max(both) <= 30 and abs(both[0] - both[1]) >= 3 for both in lengths)
    assert {pair["choice"] for pair in pairs} == {"a", "b"}
    texts = {pair[name] for pair in snippets(tmp_path) for name in ("response_a", "response_b")}
    whole = [LONG[0]["one"], " ".join(["word"] * 20 + ["more"] * 20)]
    assert all(any(full.startswith(text) for full in whole) for text in texts)
    assert {text.split()[0] for text in texts} == {"cats0", "word"}


def test_snippets_are_a_function_of_the_seed_and_of_texts_that_are_long_enough(tmp_path):
    first = snippets(tmp_path)
    assert snippets(tmp_path) == first
    assert snippets(tmp_path, seed=1) != first
    rows = [{**row, "two": "short"} for row in LONG]
    with pytest.raises(RowsError, match="no text of two has 30 words"):
        snippets(tmp_path, rows, texts=["two"])
