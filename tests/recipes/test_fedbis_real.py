import json
from collections import Counter

import pytest
from real_rows import UKP
from recipe_runs import ran, rows_of, stages_of
from tiny_world import write_rows

from fedlight import conf
from fedlight.datamodules.rows.exclusion import Holdout
from fedlight.datamodules.rows.rows import RowsError, load_rows
from fedlight.recipes import method_table
from fedlight.recipes import recipe as recipes
from fedlight.recipes.voters import sample_pairs, sample_voters
from fedlight.support.files import result_of, write_json

TRAINED, HELD = "is-porn-wrong-_yes", "tv-is-better-than-books_tv"
METHODS = [
    *("raw", "raw, letters calibrated", "longer wins, characters", "local only", "pooled votes"),
    *("FedBis", "other workers, pooled"),
]


def rows(voters=6, each=3):
    return [
        {
            **{"topic": topic, "prompt": topic, "response_a": f"{who} {n} a", "response_b": "b"},
            **{"choice": choice, "worker": f"w{who}"},
        }
        for who in range(voters)
        for topic in (TRAINED, HELD)
        for n, choice in enumerate(["tie", *"ab" * each])
    ]


def test_clients_and_the_judges_workers_are_other_people(tmp_path):
    source = write_rows(tmp_path / "votes.jsonl", rows())
    files = {name: str(tmp_path / f"{name}.jsonl") for name in ("train", "test", "others")}
    settings = {"client": "worker", "choice": "choice", "ties": ["tie"], "holdout": Holdout("topic", [HELD])}
    settings |= {"min_train": 6, "num_test": 0, "seed": 0}
    done = sample_voters(source=source, num_clients=3, **settings, **files)
    assert done == {"eligible": 6, "train": 18, "test": 0}
    ours, theirs = ({row["worker"] for row in load_rows(files[name])} for name in ("train", "others"))
    assert (len(ours), len(theirs), ours & theirs) == (3, 3, set())
    assert {row["topic"] for name in ("train", "others") for row in load_rows(files[name])} == {TRAINED}
    alone = sample_voters(source=source, num_clients=3, **settings, train=files["test"], test=files["others"])
    assert alone == done
    # The draw does not depend on the others.
    assert {row["worker"] for row in load_rows(files["test"])} == ours
    with pytest.raises(RowsError, match=r"6 voters have 6 votes .* fewer than 2 num_clients=8"):
        sample_voters(source=source, num_clients=4, **settings, **files)


def test_pairs_are_decided_held_out_and_shared_among_voters(tmp_path):
    source = write_rows(tmp_path / "gold.jsonl", rows())
    settings = {"source": source, "choice": "choice", "ties": ["tie"], "holdout": Holdout("topic", [HELD])}
    output = str(tmp_path / "pairs.jsonl")
    assert sample_pairs(**settings, held_out=True, number=10, seed=0, output=output) == {"pairs": 10}
    drawn = load_rows(output)
    assert {row["topic"] for row in drawn} == {HELD}
    assert {row["choice"] for row in drawn} == {"a", "b"}
    assert len({row["response_a"] for row in drawn}) == 10
    voters = write_rows(tmp_path / "alone.jsonl", [row for row in rows() if row["worker"] in ("w1", "w4")])
    shared = {"client": "worker", "voters": voters, "output": output}
    sample_pairs(**settings, held_out=True, number=10, seed=0, **shared)
    assert Counter(row["worker"] for row in load_rows(output)) == {"w1": 5, "w4": 5}
    assert [row["response_a"] for row in load_rows(output)] == [row["response_a"] for row in drawn]
    assert sample_pairs(**settings, held_out=False, number=100, seed=0, output=output) == {"pairs": 36}
    assert {row["topic"] for row in load_rows(output)} == {TRAINED}


def test_its_twin_has_the_same_stages(tmp_path):
    large, small = (stages_of("fedbis_real", tmp_path, twin=twin) for twin in (False, True))
    assert [*large] == [*small]
    for name, stage in large.items():
        extra = {"data.init_args.columns.group"} if name == "local_only" else set()
        assert {*small[name].arguments} == {*stage.arguments} | extra
    tested = ("selector_test", "raw_test", "pooled_test", "others_test")
    for name in ("selector", "pooled", "others", "local_only", *tested):
        assert large[name].arguments["model.init_args.orders"] == "both"
        assert large[name].arguments["data.init_args.format.trim"] is None  # half a claim is no claim
    assert large["pooled"].arguments["trainer.limit_train_batches"] == 5 * 4
    held = json.dumps(recipes.load("fedbis_real")["held_out"])
    assert "should-physical-education" in held
    assert "tv-is-better" in held


def test_the_longer_answer_is_judged_on_the_pairs_that_selectors_read(tmp_path, tiny_model):
    """Of two pairs one is too long for the selector: the longer answer is right on that one alone."""
    pairs = [
        {"prompt": "p", "response_a": "x", "response_b": "long " * 200, "choice": "b"},
        {"prompt": "p", "response_a": "x", "response_b": "long er", "choice": "a"},
    ]
    changes = (f"model={tiny_model}", f"test_source={write_rows(tmp_path / 'gold.jsonl', pairs)}")
    stage = stages_of("fedbis_real", tmp_path, *changes, "max_tokens=100")["longer_characters"]
    metrics = stage.run()["result"]["metrics"]
    assert (metrics["test/votes"], metrics["test/accuracy"]) == (1, 0.0)


def test_the_prompts(tmp_path, tiny_model):
    source = write_rows(tmp_path / "gold.jsonl", UKP)
    ran(
        *("predict", "--config=completions.yaml", f"--data={conf.path('data/debate_prompts.yaml')}"),
        *(f"--data.source={source}", f"--data.tokenizer={tiny_model}", f"--model.model={tiny_model}"),
        *("--data.limit=3", "--model.completions.max_new_tokens=2", "--model.completions.number=1"),
        *("--trainer.accelerator=cpu", f"--trainer.default_root_dir={tmp_path}"),
    )
    fields = [row["fields"] for row in load_rows(str(tmp_path / "completions.jsonl"))]
    assert fields == [{"prompt": "claim", "example": f"one {i}"} for i in range(3)]


@pytest.mark.parametrize(("low", "column"), [(0.5, "win_rate_worthless"), (0.51, "win_rate")])
def test_a_judge_at_chance_is_named_so(tmp_path, monkeypatch, low, column):
    class Judge:
        too_long = trimmed = 0

        def __init__(self, *_, **__):
            pass

        def verdicts(self, fields, ours, theirs):
            return [float(len(a) > len(b)) for a, b in zip(ours, theirs, strict=True)]

    monkeypatch.setattr(method_table, "SelectorJudge", Judge)
    metrics = {"test/accuracy_both_orders": 0.6, "test/accuracy_both_orders_low": low}
    write_json(tmp_path / "judge/done.json", {"result": {"metrics": metrics}})
    answers = {}
    for name, lengths in {"raw": [5] * 24, "tuned": [9] * 12 + [1] * 12}.items():
        (tmp_path / name).mkdir()
        texts = [{"fields": {"prompt": "p"}, "completions": ["x" * length]} for length in lengths]
        write_rows(tmp_path / name / "completions.jsonl", texts)
        answers[name] = {"answers": str(tmp_path / name)}
    judge = {"judge": "adapter", "judge_test": str(tmp_path / "judge"), "at_equal_length": True}
    raw, tuned = method_table.methods(answers, **judge)["rows"]
    assert (raw[column], tuned[column]) == (0.5 if raw[column] else 0.0, 0.5)
    assert f"{column}_at_equal_length" not in raw
    assert tuned[f"{column}_at_equal_length"] == pytest.approx(0.5, abs=1e-6)  # it judges by length alone


@pytest.mark.slow
def test_the_twin_runs(tmp_path, tiny_model):
    ran(
        *("run", "fedbis_real", "--twin", "--seeds=0", f"--output={tmp_path}", f"model={tiny_model}"),
        *("accelerator=cpu", "rounds=1", "clients_per_round=2", "local_steps=1", "local_steps_alone=1"),
        *("others_steps=10", "test_pairs=24", "num_prompts=8", "duel_prompts=8", "max_new_tokens=6"),
        *("dpo_epochs=1", "dpo_lr=0.05"),
    )
    rows = rows_of(tmp_path)
    assert [*rows] == METHODS
    for row in rows.values():
        assert 0 <= row["both_orders_low"] <= row["both_orders"] <= row["both_orders_high"] <= 1
    assert rows["FedBis"]["labelled"] <= 8
    assert any(name.startswith("win_rate") for name in rows["FedBis"])
    lost = {name: row["perplexity_elsewhere"] for name, row in rows.items() if "knowledge" in row}
    assert list(lost) == ["raw", "FedBis"]
    assert lost["raw"] != lost["FedBis"]  # the tuned model is another one
    letters = json.loads((tmp_path / "seed0/letters/letters.json").read_text())
    assert 0.01 <= letters["temperature"] <= 100
    # No letter is preferred in both orders.
    assert rows["raw"]["both_orders"] == rows["raw, letters calibrated"]["both_orders"]
    written = result_of(tmp_path / "seed0/results")["rows"]
    assert [row["method"] for row in written] == ["raw", "FedBis", "longer wins"]
