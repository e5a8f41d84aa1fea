import numpy as np
import pytest
from omegaconf import OmegaConf
from tiny_world import make_encoder, write_rows

from fedlight.datamodules.preferences.baselines import LENGTHS, describe, longer_wins, majority_of_others
from fedlight.datamodules.rows.rows import RowsError
from fedlight.datamodules.rows.votes import read_votes
from fedlight.recipes.vote_baselines import rule, rule_on_data

COLUMNS = {name: name for name in ("prompt", "response_a", "response_b", "choice", "client")}
NOBODYS = {name: name for name in ("prompt", "response_a", "response_b", "choice")}
VALUES = {"a": "a", "b": "b", "tie": "tie"}


def vote(client, choice, a="long text", b="short", prompt="which"):
    return {"prompt": prompt, "response_a": a, "response_b": b, "choice": choice, "client": client}


def read(rows):
    return read_votes(rows, COLUMNS, VALUES, (), "votes")


@pytest.fixture(scope="module")
def many():
    """Votes of up to eight voters on thirty comparisons, some in the other order, some ties and some on both sides."""
    rng = np.random.default_rng(0)
    rows = []
    for pair in range(30):
        a, b = ("x " * rng.integers(1, 5) + f"a{pair}" for _ in range(2))
        for voter in rng.permutation(8)[: rng.integers(1, 8)]:
            choice = str(rng.choice(["a", "b", "tie"], p=[0.6, 0.3, 0.1]))
            swapped = rng.integers(2)
            sides = (f"{b} b", a) if swapped else (a, f"{b} b")
            flipped = {"a": "b", "b": "a", "tie": "tie"}[choice] if swapped else choice
            rows.append(vote(f"v{voter}", flipped, *sides))
            if rng.random() < 0.1 and choice != "tie":
                rows.append(vote(f"v{voter}", {"a": "b", "b": "a"}[flipped], *sides))
    return rows


def winners(rows):
    """(pair, voter, winning text) of decided rows, each once."""
    found = []
    for row in rows:
        if row["choice"] != "tie":
            sides = row["response_a"], row["response_b"]
            key = (frozenset(sides), row["client"], sides[row["choice"] == "b"])
            if key not in found:
                found.append(key)
    return found


@pytest.mark.parametrize("least", [2, 3, 4])
def test_the_majority_of_the_others_is_the_loop(many, least):
    votes = winners(many)
    expected = []
    for pair, voter, winner in votes:
        voters = {who for which, who, _ in votes if which == pair}
        others = [text == winner for which, who, text in votes if which == pair and who != voter]
        agree, disagree = sum(others), len(others) - sum(others)
        half = 0.5 + 0.5 * ((agree > disagree) - (agree < disagree))
        expected.append(half if len(voters) >= least else np.nan)
    found = majority_of_others(read(many), least)
    np.testing.assert_array_equal(found, expected)
    assert {0.0, 0.5, 1.0} < set(found.tolist())
    assert np.isnan(found).any()


@pytest.mark.parametrize("measure", ["characters", "words"])
def test_the_longer_wins_is_the_loop(many, measure):
    votes = winners(many)
    expected = []
    for pair, _, winner in votes:
        (loser,) = pair - {winner}
        won, lost = (LENGTHS[measure](text) for text in (winner, loser))
        expected.append(0.5 + 0.5 * ((won > lost) - (won < lost)))
    found = longer_wins(read(many), LENGTHS[measure])
    assert found.tolist() == expected
    assert 0.0 in expected
    assert 1.0 in expected


def test_the_order_of_rows_and_answers_does_not_matter(many):
    swapped = [
        {**row, "response_a": row["response_b"], "response_b": row["response_a"], "choice": other}
        for row in reversed(many)
        for other in [{"a": "b", "b": "a", "tie": "tie"}[row["choice"]]]
    ]
    for score in (majority_of_others, lambda votes: longer_wins(votes, len)):
        np.testing.assert_array_equal(np.sort(score(read(many))), np.sort(score(read(swapped))))


def test_votes_without_voters_have_no_others_and_gold_labels_no_clients(tmp_path):
    rows = [vote("u", "a")]
    with pytest.raises(ValueError, match=r"needs a column of voters: set columns\.client"):
        majority_of_others(read_votes(rows, NOBODYS, VALUES, (), "votes"))
    test = write_rows(tmp_path / "gold.jsonl", [vote("", "a"), vote("", "b", prompt="again")])
    metrics = rule(test, NOBODYS, VALUES, "words")["metrics"]
    assert metrics["test/accuracy"] == 0.5
    assert "test/client_mean" not in metrics


def test_a_stage_tests_some_of_the_votes_by_all_of_them(tmp_path):
    # for u and v the others are tied, for w they are against it
    rows = [vote("u", "a"), vote("v", "a"), vote("w", "b")]
    rows += [vote("u", "b", prompt="again"), vote("v", "b", prompt="again"), vote("x", "b", prompt="again")]
    rows += [vote("u", "a", prompt="alone"), vote("v", "tie", prompt="alone")]
    source = write_rows(tmp_path / "all.jsonl", rows)
    test = write_rows(tmp_path / "test.jsonl", [rows[0], rows[2], rows[3], rows[6]])
    found = rule(test, COLUMNS, VALUES, "voters", source)
    assert (found["votes"], found["comparisons"]) == (4, 3)
    metrics = found["metrics"]
    assert (metrics["test/votes"], metrics["test/votes_unjudged"]) == (3, 1)  # a comparison with one voter
    assert metrics["test/accuracy"] == metrics["test/accuracy_both_orders"] == (0.5 + 0 + 1) / 3
    assert metrics["test/client_mean"] == (0.75 + 0) / 2
    # one comparison twice, or both, or the other twice
    assert metrics["test/accuracy_both_orders_low"] == 0.25
    assert metrics["test/accuracy_both_orders_high"] == 1.0
    longer = rule(test, COLUMNS, VALUES, "characters")["metrics"]
    assert (longer["test/accuracy"], longer["test/votes"]) == (0.5, 4)
    assert longer["test/client_mean"] == (2 / 3 + 0) / 2
    nobody = rule(test, COLUMNS, VALUES, "voters")
    assert nobody == {"metrics": {"test/votes": 0, "test/votes_unjudged": 4}, "votes": 4, "comparisons": 3}


def test_what_a_stage_refuses(tmp_path):
    test = write_rows(tmp_path / "test.jsonl", [vote("u", "a")])
    other = write_rows(tmp_path / "other.jsonl", [vote("v", "a")])
    with pytest.raises(RowsError, match=r"1 of its 1 votes are not in .*other\.jsonl, such as one of 'u'"):
        rule(test, COLUMNS, VALUES, "voters", other)
    with pytest.raises(ValueError, match="rule='word': did you mean 'words'"):
        rule(test, COLUMNS, VALUES, "word")


def config_of_data(folder, columns, **settings):
    init_args = {
        **{"source": "nowhere.jsonl", "columns": columns, "split": {"test_source": "nowhere.jsonl"}},
        "format": {"choice_values": VALUES, "form": "pair", "pair_template": "{prompt}"},
        **{"max_tokens": 24, "tokenizer": "nowhere"},
        **settings,
    }
    file = folder / "data.yaml"
    OmegaConf.save({"class_path": "fedlight.PreferenceDataModule", "init_args": init_args}, file)
    return str(file)


def test_rules_see_the_votes_that_a_selector_is_tested_on(many, tmp_path, caplog):
    """A pair that does not fit and one without a prompt are left out by both; the others are those of the stage ``rule``."""
    long = " ".join(["word"] * 60)
    left_out = [vote(f"v{n}", "a", f"{long} {n}", "b", prompt="long") for n in range(5)]
    left_out += [vote("v1", "b", prompt="") for _ in range(2)]
    test, encoder = write_rows(tmp_path / "test.jsonl", many + left_out), make_encoder(tmp_path / "encoder")
    kept = write_rows(tmp_path / "kept.jsonl", many)
    data = config_of_data(tmp_path, COLUMNS)
    caplog.set_level("INFO")
    for name in ("characters", "words", "voters"):
        found = rule_on_data(data, name, {"split.test_source": test, "tokenizer": encoder})
        assert found == rule(kept, COLUMNS, VALUES, name)
        assert found["votes"] == len(winners(many))
    of_rules = [rule(kept, COLUMNS, VALUES, name)["metrics"] for name in ("characters", "words", "voters")]
    longer, words, others = (metrics["test/accuracy"] for metrics in of_rules)
    printed = f"wins {longer:.3f} (by words {words:.3f}); majority of the other voters {others:.3f}, on "
    assert f"{printed}{found['metrics']['test/votes']} of {found['votes']} votes" in caplog.text
    assert describe(read(many)) in caplog.text
    assert found["metrics"]["test/votes"] + found["metrics"]["test/votes_unjudged"] == len(winners(many))
    assert found["metrics"]["test/votes_unjudged"] > 0
    assert rule(test, COLUMNS, VALUES, "characters")["votes"] > found["votes"]


def test_agreement_is_unknown_where_labels_are_nobodys(tmp_path, caplog):
    rows = [vote("", "a"), vote("", "b", prompt="again")]
    test, encoder = write_rows(tmp_path / "test.jsonl", rows), make_encoder(tmp_path / "encoder")
    data = config_of_data(tmp_path, NOBODYS, partition={"by": "iid", "num_clients": 2})
    with caplog.at_level("INFO"):
        found = rule_on_data(data, "voters", {"split.test_source": test, "tokenizer": encoder})
    assert found == {"metrics": {"test/votes": 0, "test/votes_unjudged": 2}, "votes": 2, "comparisons": 2}
    unknown = "the longer answer wins 0.500 (by words 0.500); majority of the other voters unknown, on 0 of 2"
    assert unknown in caplog.text
    assert "far voters agree is unknown, as none of 2 votes on 2 comparisons has other voters" in caplog.text
    assert (
        rule_on_data(data, "words", {"split.test_source": test, "tokenizer": encoder})["metrics"][
            "test/accuracy"
        ]
        == 0.5
    )
    with pytest.raises(ValueError, match="rule='voter': did you mean 'voters'"):
        rule_on_data(data, "voter", {"split.test_source": test, "tokenizer": encoder})
