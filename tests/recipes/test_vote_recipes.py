"""The recipes of real votes: whole on a few rows with the columns of the data, their first stages on the data themselves.

FEDLIGHT_SHARED names a folder that has ``data/ukpconvarg/votes.jsonl.gz`` and ``data/mtbench/human_votes.jsonl.gz``.
"""

import json
import os
from collections import Counter
from pathlib import Path

import pytest
from real_rows import MTBENCH, UKP
from recipe_runs import ran, rows_of, stages_of
from tiny_world import make_encoder, read_lines, table, write_rows

from fedlight.recipes import recipe as recipes
from fedlight.support.files import result_of

VOTERS = [f"w{number}" for number in range(5)]
ONE, OTHER = (" ".join(f"{word} {number % 10}" for number in range(20)) for word in ("one", "other"))


def votes(row, *, voter, choice, winners, column, trained, held_out):
    """Rows like ``row`` of each voter: a tie and four decided votes to train on, and one of each that is held out."""
    sides = [trained] * 5 + held_out
    return [
        {**row, voter: name, choice: winners[(number + index) % 2 if number else 2], column: side, **answers}
        for index, name in enumerate(VOTERS)
        for number, side in enumerate(sides)
        for answers in [_answers(row, f"{index} {number}")]
    ]


def _answers(row, mark):
    if "answers_a" in row:
        return {"answers_a": [f"{ONE} {mark}", "b"], "answers_b": [f"{mark} {OTHER}", "a"]}
    return {"response_a": f"{ONE} {mark}", "response_b": f"{mark} {OTHER}"}


ROWS = {
    "ukpconvarg": votes(
        UKP[0],
        **{"voter": "worker", "choice": "choice", "winners": ("a", "b", "tie"), "column": "topic"},
        trained="is-porn-wrong-_yes",
        held_out=[
            "firefox-vs-internet-explorer_no",
            "is-the-school-uniform-a-good-or-bad-idea-_good",
            "should-physical-education-be-mandatory-in-schools-_no-",
        ],
    ),
    "mtbench": votes(
        MTBENCH[0],
        **{"voter": "judge", "choice": "winner", "column": "category"},
        winners=("model_a", "model_b", "tie (inconsistent)"),
        trained="math",
        held_out=["writing", "roleplay"],
    ),
}
REAL = {  # file, voters, eligible ones of them, votes that are tested
    "ukpconvarg": ("ukpconvarg/votes.jsonl.gz", 40, 12),
    "mtbench": ("mtbench/human_votes.jsonl.gz", 30, 6),
}


RULES = ["longer wins, characters", "longer wins, words", "majority of the other voters"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ROWS)
def test_the_whole_recipe(recipe, tmp_path):
    encoder = make_encoder(tmp_path / "encoder")
    rows = write_rows(tmp_path / "votes.jsonl", ROWS[recipe])
    ran(
        *("run", recipe, f"--output={tmp_path / 'out'}", f"votes={rows}", f"model={encoder}"),
        *("accelerator=cpu", "num_clients=4", "min_train=4", "num_test=2", "batch_size=4", "max_tokens=90"),
        *("exercise_epochs=1", "rounds=4", "clients_per_round=2", "local_steps=1", "local_only_steps=2"),
        *("warmup_rounds=1", "regroup_every=1", "val_share=0.3"),
    )
    run = tmp_path / "out/seed0"
    assert result_of(run / "clients") == {"eligible": 5, "train": 4 * 4, "test": 4 * 2}
    found = rows_of(tmp_path / "out")
    assert list(found) == [*RULES, "start", "local only", "pooled votes", "FedBis", "FedBiscuit"]
    # 8 votes, twice
    assert all(row["own"] * 16 == pytest.approx(round(row["own"] * 16)) for row in [*found.values()][3:])
    longer, words, voters = (found[rule] for rule in RULES)
    assert (longer["votes"], words["votes"]) == (8, 8)
    assert words["both_orders"] == words["own"] == 0.5  # as many words on both sides
    assert longer["both_orders"] == longer["accuracy"] in [correct / 8 for correct in range(9)]
    # Each comparison has one voter.
    assert voters == {"method": RULES[2], "seed": 0, "votes": 0, "unjudged": 8}
    for method in ("start", "local only", "pooled votes", "FedBis", "FedBiscuit"):
        row = found[method]
        assert row["both_orders"] * 8 == pytest.approx(round(row["both_orders"] * 8))  # or undecided, by half
        assert row["both_orders_low"] <= row["both_orders"] <= row["both_orders_high"]
    assert found["pooled votes"]["sent_mib"] == 0 < found["FedBis"]["sent_mib"]
    visited = [row["client"] for row in table(run / "local_only/visits.csv")]
    assert sorted(visited) == sorted({row["client"] for row in table(run / "fedbiscuit/groups.csv")})
    for stage in ("fedbis", "fedbiscuit"):
        assert len(table(run / f"{stage}/visits.csv")) == 4 * 2
        settings = json.loads((run / f"{stage}/settings.json").read_text())
        assert settings["model.init_args.adapter"] == "./seed0/exercise/adapter"


@pytest.mark.parametrize("recipe", REAL)
def test_local_training_has_as_many_steps_in_all(recipe):
    values = recipes.load(recipe)
    steps = values["rounds"] * values["clients_per_round"] * values["local_steps"]
    assert values["local_only_steps"] * values["num_clients"] == steps == 240


@pytest.mark.skipif(not os.environ.get("FEDLIGHT_SHARED"), reason="FEDLIGHT_SHARED is not set")
@pytest.mark.parametrize("recipe", REAL)
def test_the_voters_of_the_data(recipe, tmp_path):
    file, num_clients, num_test = REAL[recipe]
    source = Path(os.environ["FEDLIGHT_SHARED"]) / "data" / file
    values = recipes.load(recipe, [f"votes={source}"])
    drawn = {}
    for seed in (0, 1):
        stages = stages_of(recipe, tmp_path / str(seed), f"votes={source}", seed=seed)
        done = stages["clients"].run()["result"]
        train, test = (read_lines(tmp_path / f"{seed}/clients/{side}.jsonl") for side in ("train", "test"))
        assert (done["train"], done["test"]) == (len(train), len(test))
        assert len(test) == num_clients * num_test
        tested, trained = (Counter(row[values["client"]] for row in rows) for rows in (test, train))
        assert set(tested.values()) == {num_test}
        assert set(trained) == set(tested)
        assert min(trained.values()) >= values["min_train"]
        assert not any(row[values["choice"]] in values["ties"] for row in train + test)
        # What is tested on, no client trains on.
        sides = [{row[values["holdout_column"]] for row in rows} for rows in (train, test)]
        assert not sides[0] & sides[1]
        drawn[seed] = set(tested)
        names = ("longer_characters", "longer_words", "other_voters")
        rules = [stages[name].run()["result"] for name in names]
        assert {rule["votes"] for rule in rules} == {num_clients * num_test}
        for rule, judged in zip(rules, (1, 1, 0.3), strict=True):
            assert judged * rule["votes"] <= rule["metrics"]["test/votes"] <= rule["votes"]
            assert 0.6 < rule["metrics"]["test/accuracy"] < 0.9
    stages["snippets"].run()
    assert len(read_lines(tmp_path / "1/snippets/pairs.jsonl")) == 2000
    assert drawn[0] != drawn[1]
    assert done["eligible"] > num_clients
