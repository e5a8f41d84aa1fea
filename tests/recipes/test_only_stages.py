import json

import pytest
from tiny_world import fedlight

from fedlight.recipes.chosen_stages import chosen_stages
from fedlight.recipes.recipe import load, stages, stages_over_seeds


@pytest.fixture
def run_small(tmp_path, monkeypatch):
    """Runs a recipe of function calls; ``done`` are the calls, in order."""
    done = []

    def note(name, **arguments):
        done.append(name)
        return {"rows": [{"method": name}]}

    monkeypatch.setattr("fedlight.recipes.steps.note", note, raising=False)
    written = {
        "a": call("a"),
        "b": call("b", adapter="${run}/a/adapter", output="${run}/shared/b"),
        "c": call("c", reads="${run}/a"),
        "d": call("d", table={"rows": ["${run}/shared/b/rows.jsonl"]}),
        "e": call("e", text='{"x": "${run}/c/rows.jsonl?y=1"}'),
    }
    behind = {"f": call("f", runs="${every:c}", output="${run}/f"), "g": call("g", figure="${run}/f/f.svg")}
    recipe = {"seeds": [0, 1], "stages": written, "over_seeds": behind}
    (tmp_path / "small.yaml").write_text(json.dumps(recipe))

    def run(*arguments):
        done.clear()
        outcome = fedlight("run", str(tmp_path / "small.yaml"), f"--output={tmp_path / 'out'}", *arguments)
        return outcome, list(done)

    return run


def call(name, **more):
    return {"call": "fedlight.recipes.steps.note", "with": {"name": name, **more}}


@pytest.mark.parametrize(
    ("only", "wanted"),
    [(["a"], "a"), (["c"], "ac"), (["d"], "abd"), (["e"], "ace"), (["c", "d"], "abcd"), (["b", "a"], "ab")],
)
def test_a_stage_and_what_it_reads_from(run_small, tmp_path, only, wanted):
    outcome, done = run_small("--seeds", "0", "--only", *only)
    assert outcome.code == 0, outcome.err
    assert "".join(done) == wanted
    assert not (tmp_path / "out/results.json").exists()
    assert f"seed 0, {wanted[-1]}: done" in outcome.out


def test_what_is_behind_all_seeds(run_small):
    assert "".join(run_small("--only", "g")[1]) == "acacfg"


def test_the_others_are_done_later(run_small, tmp_path):
    run_small("--seeds", "1", "--only", "d")
    assert "".join(run_small()[1]) == "abcdecefg"
    assert len(json.loads((tmp_path / "out/results.json").read_text())["rows"]) == 2
    results = (tmp_path / "out/results.json").read_bytes()
    assert run_small("--only", "d")[1] == []
    assert (tmp_path / "out/results.json").read_bytes() == results


@pytest.mark.parametrize(
    ("argument", "wanted"),
    [
        ({"folder": "${run}"}, ["a", "my stage, 1", "b"]),
        ({"folder": "${run}/"}, ["a", "my stage, 1", "b"]),
        ({"output": "${run}"}, ["b"]),
        ({"folder": "${run}1/a"}, ["b"]),
        ({"rows": "${run}/my stage, 1/rows.jsonl"}, ["my stage, 1", "b"]),
        ({"text": "[${run}/my stage, 1, ${run}/a?x=1]"}, ["a", "my stage, 1", "b"]),
        ({"rows": "${run}/shared/x.json"}, ["a", "b"]),
    ],
    ids=str,
)
def test_the_folder_of_the_run_and_names_with_blanks(tmp_path, argument, wanted):
    told = {"a": {"key": "${run}/shared,x"}, "my stage, 1": {"key": "x"}, "b": argument}
    written = {name: {"call": "fedlight.recipes.overlay.plain", "with": own} for name, own in told.items()}
    (chosen,), _ = chosen_stages([stages({"stages": written}, tmp_path / "seed0", 0)], [], ["b"])
    assert [stage.name for stage in chosen] == wanted


def test_no_such_stage_and_a_dry_run_looks_at_all(run_small):
    outcome, done = run_small("--only", "aa")
    assert (outcome.code, done) == (2, [])
    assert "--only aa: the recipe has no stage 'aa'; did you mean 'a'?" in outcome.err
    outcome, _ = run_small("--only", "a", "--dry-run")
    assert outcome.code == 2
    assert "leave out --only" in outcome.err


@pytest.mark.parametrize(
    ("recipe", "only", "wanted"),
    [
        ("demo", "selector_test", ["selector", "selector_test"]),
        ("feddca", "none_fedprox", ["none_fedprox"]),
        ("feddca_star", "feddca_star", ["projector", "feddca_star"]),
        ("fewfedpit", "wins", None),
    ],
)
def test_stages_of_recipes(recipe, only, wanted, tmp_path):
    told = load(recipe)
    steps = stages(told, tmp_path / "seed0", 0)
    (chosen,), behind = chosen_stages([steps], stages_over_seeds(told, tmp_path, [0]), [only])
    names = [stage.name for stage in chosen]
    assert behind == []
    assert names == (wanted or [stage.name for stage in steps if stage.name not in ("zero_shot", "table")])


def test_a_table_needs_all_that_it_compares(tmp_path):
    """The augmentation folders are no stages' own: of those that name one, the first makes it."""
    steps = stages(load("heterogeneity"), tmp_path / "seed0", 0)
    (chosen,), _ = chosen_stages([steps], [], ["table"])
    left_out = {stage.name for stage in steps} - {stage.name for stage in chosen}
    assert left_out <= {"zero_shot", "labels_of_clients"}
