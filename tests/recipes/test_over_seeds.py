import json

import pytest
from tiny_world import fedlight

from fedlight.recipes import recipe as recipes
from fedlight.support.files import result_of


def note(**arguments):
    return {"rows": [{"method": "m", "value": 1}], "got": arguments}


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr("fedlight.recipes.steps.note", note, raising=False)

    def run(recipe, *arguments):
        (tmp_path / "small.yaml").write_text(json.dumps(recipe))
        return fedlight("run", str(tmp_path / "small.yaml"), f"--output={tmp_path / 'out'}", *arguments)

    return run


def call(**arguments):
    return {"call": "fedlight.recipes.steps.note", "with": arguments}


RECIPE = {
    "seeds": [0, 1],
    "x": 7,
    "source": "toy:${seed}",  # of one seed's run alone
    "stages": {"train": call(source="${source}"), "table": call(run="${run}")},
    "over_seeds": {
        "figure": call(tables="${every:table}", output="${run}/figure/f.svg", x="${x}"),
        "other": {"like": "figure", "with": {"x": 8}},
    },
}


def got(folder):
    return result_of(folder)["got"]


def test_they_run_once_with_the_folders_of_every_seed(run, tmp_path):
    outcome = run(RECIPE)
    assert outcome.code == 0, outcome.err
    out = tmp_path / "out"
    assert outcome.err.split() == ["──", "train", "──", "table"] * 2 + ["──", "figure", "──", "other"]
    figure = got(out / "seeds_0_1/figure")
    tables = [str(out / f"seed{seed}/table") for seed in (0, 1)]
    assert figure == {"tables": tables, "output": str(out / "seeds_0_1/figure/f.svg"), "x": 7}
    assert got(out / "seeds_0_1/other") == {**figure, "x": 8}
    rows = json.loads((out / "results.json").read_text())["rows"]
    assert [row["seed"] for row in rows] == [0, 1]  # theirs are no results
    assert "──" not in run(RECIPE).err


def test_another_set_of_seeds_has_stages_of_its_own(run, tmp_path):
    run(RECIPE, "--seeds", "1")
    assert got(tmp_path / "out/seeds_1/figure")["tables"] == [str(tmp_path / "out/seed1/table")]
    outcome = run(RECIPE, "--seeds", "1", "2")
    assert outcome.err.split() == ["──", "train", "──", "table", "──", "figure", "──", "other"]
    assert (tmp_path / "out/seeds_1_2/figure/done.json").is_file()
    changed = run({**RECIPE, "x": 9}, "--seeds", "1")
    assert changed.code == 2
    assert "seeds_1/figure was made with other settings (x: 7 -> 9)" in changed.err


def test_a_further_seed_has_the_settings_of_those_that_are_there(run, tmp_path):
    run(RECIPE, "--seeds", "0", "--only", "train")
    changed = {**RECIPE, "source": "other:${seed}"}
    outcome = run(changed, "--seeds", "1")
    assert outcome.code == 2
    assert "seed0/train was made with other settings (source: toy:0 -> other:0)" in outcome.err
    assert not (tmp_path / "out/seed1/train/done.json").exists()
    assert run(RECIPE, "--seeds", "1").code == 0


def test_what_is_wrong_is_said_before_any_stage(run, tmp_path):
    for wrong, why in (
        ({"figure": call(x="${seed}")}, "the recipe refers to what it does not have"),
        ({"figure": {"like": "train"}}, "stage figure is like 'train', which is no stage before it"),
        (
            {"figure": {"call": "fedlight.recipes.steps.no"}},
            "there is no function 'fedlight.recipes.steps.no'",
        ),
        (["figure"], "a recipe needs stages"),
    ):
        outcome = run({**RECIPE, "over_seeds": wrong})
        assert outcome.code == 2
        assert why in outcome.err
    assert not (tmp_path / "out/seed0").exists()


def test_every_is_known_to_a_seeds_own_stages_and_extends_adds_to_them(tmp_path):
    one = {"call": "fedlight.recipes.steps.merge_adapter", "with": {"model": "${every:one}"}}
    recipe = {"stages": {"one": one}}
    (stage,) = recipes.stages(recipe, tmp_path, 4)
    assert stage.arguments == {"model": [str(tmp_path / "one")]}
    assert recipes.stages_over_seeds(recipe, tmp_path, [4]) == []
    (tmp_path / "base.yaml").write_text(json.dumps(RECIPE))
    more = {"extends": "base.yaml", "over_seeds": {"other": {"with": {"x": 9}}}}
    (tmp_path / "more.yaml").write_text(json.dumps(more))
    merged = recipes.load(str(tmp_path / "more.yaml"))
    assert merged["over_seeds"]["other"] == {"like": "figure", "with": {"x": 9}}


@pytest.mark.parametrize(
    ("seeds", "arguments"),
    [([0, 1], ["--seeds", "1", "1"]), ([0, 0], []), ([], []), (3, []), ([0.5], []), ([-1], ["--dry-run"])],
)
def test_seeds_that_are_no_different_whole_numbers_are_refused(run, seeds, arguments):
    """Over seeds, a run that counts twice would have a deviation of 0."""
    outcome = run({**RECIPE, "seeds": seeds}, *arguments)
    assert outcome.code == 2
    assert "whole numbers from 0 to 4294967295, each once" in outcome.err
