import json
from pathlib import Path

import lightning as L
import pytest
from jsonargparse.typing import path_type
from recipe_runs import ran, rows_of
from tiny_world import fedlight, refused, tiny_recipe

from fedlight.recipes import recipe as recipes
from fedlight.recipes import stages, steps
from fedlight.support.results import summary


@pytest.fixture(scope="module")
def demo(tiny_model, tmp_path_factory):
    """Folder of a finished run of the recipe demo."""
    folder = tmp_path_factory.mktemp("demo")
    assert "win rate vs raw" in demo_again(folder, tiny_model).out
    return folder


def demo_again(folder, tiny_model):
    return ran("run", "demo", f"--output={folder}", "--seeds", "3", *tiny_recipe(tiny_model))


@pytest.fixture
def run_small(tmp_path, monkeypatch):
    """Writes a recipe of function calls and runs it; ``done`` are the calls, in order."""
    done = []

    def note(name, **arguments):
        done.append(name)
        return {"rows": [{"method": name, **arguments}]}

    monkeypatch.setattr("fedlight.recipes.steps.note", note, raising=False)

    def run(recipe, *arguments, name="small.yaml"):
        (tmp_path / name).write_text(recipe if isinstance(recipe, str) else json.dumps(recipe))
        done.clear()
        return fedlight("run", str(tmp_path / name), f"--output={tmp_path / 'out'}", *arguments)

    run.done = done
    run.folder = tmp_path
    run.results = lambda: json.loads((tmp_path / "out/results.json").read_text())
    return run


def call(name, **more):
    return {"call": "fedlight.recipes.steps.note", "with": {"name": name}, **more}


def test_the_demo_writes_its_results(demo):
    results, rows = json.loads((demo / "results.json").read_text()), rows_of(demo)
    assert results["recipe"] == "demo"
    assert {row["seed"] for row in rows.values()} == {3}
    assert [*rows] == ["raw", "FedBis", "oracle", "longer wins"]
    assert rows["raw"]["win_rate_vs_raw"] == 0.5
    assert all(0 <= row["selector_accuracy"] <= 1 for row in rows.values())
    assert set(results["versions"]) >= {"fedlight", "torch", "lightning"}
    seed = demo / "seed3"
    assert len((seed / "selector/visits.csv").read_text().splitlines()) == 1 + 2 * 2
    written = {"adapter_config.json", "adapter_model.safetensors"}
    assert written <= {file.name for file in (seed / "dpo/adapter").iterdir()}


def test_the_demos_adapter_loads_with_peft(demo, tiny_model):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    for stage in ("selector", "dpo"):
        base = AutoModelForCausalLM.from_pretrained(tiny_model)
        loaded = PeftModel.from_pretrained(base, demo / f"seed3/{stage}/adapter")
        assert any("lora_B" in name and value.any() for name, value in loaded.named_parameters())


def test_a_second_call_does_nothing_that_is_done_and_other_settings_are_refused(demo, tiny_model):
    def written():
        return {file: file.stat().st_mtime_ns for file in (demo / "seed3").rglob("*")}

    before, results = written(), (demo / "results.json").read_text()
    assert "──" not in demo_again(demo, tiny_model).err
    assert (written(), (demo / "results.json").read_text()) == (before, results)
    changed = tiny_recipe(tiny_model, "local_steps=9")
    outcome = fedlight("run", "demo", f"--output={demo}", "--seeds", "3", *changed)
    assert outcome.code == 2
    assert "federated.local_steps: 2 -> 9): give another --output, or delete" in outcome.err
    assert "seed3/selector was made with" in outcome.err


def test_a_stage_that_was_begun_with_other_settings_is_refused(run_small, monkeypatch, tmp_path):
    def fail(name, **arguments):
        next(tmp_path.rglob("one/settings.json")).with_name("rows.jsonl.partial").touch()
        raise ValueError("no")

    recipe = {"seeds": [0], "x": 1, "stages": {"one": call("one")}}
    recipe["stages"]["one"]["with"]["value"] = "${x}"
    monkeypatch.setattr("fedlight.recipes.steps.note", fail)
    assert run_small(recipe).code == 2
    outcome = run_small(recipe, "x=2")
    assert "one was made with other settings (value: 1 -> 2)" in outcome.err


def test_a_failed_stage_is_done_again_and_the_ones_before_are_not(run_small, monkeypatch):
    good = steps.note
    recipe = {"seeds": [0], "stages": {"one": call("one"), "two": call("two")}}

    def fail_at_two(name, **arguments):
        if name == "two":
            raise OSError("the disk is gone")
        return good(name, **arguments)

    monkeypatch.setattr("fedlight.recipes.steps.note", fail_at_two)
    assert "fedlight: the disk is gone" in run_small(recipe).err
    monkeypatch.setattr("fedlight.recipes.steps.note", good)
    assert run_small(recipe).code == 0
    assert run_small.done == ["two"]


class Reads(L.Callback):
    """Reads a file of an earlier stage when it is made."""

    def __init__(self, file: str) -> None:
        Path(file).read_text()


DPSGD = {"class_path": "DPSGD", "init_args": {"clip_norm": 1.0, "noise_multiplier": 1.0}}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"trainer.overfit_batches": 0.5}, "trainer.overfit_batches=0.5 would cut a round"),
        ({"model.lr": -1}, "lr=-1"),
        ({"federated.parts": [DPSGD], "federated.clients_at_once": 2}, "set --federated.clients_at_once 1"),
        ({"federated.local_stepz": 1}, "local_stepz"),
    ],
)
def test_wrong_settings_of_a_later_stage_are_refused_before_the_first(wrong, message, run_small, monkeypatch):
    monkeypatch.setattr("fedlight.recipes.steps.Reads", Reads, raising=False)
    reads = {"class_path": "fedlight.recipes.steps.Reads", "init_args": {"file": "${run}/one/rows"}}
    given = {
        "model.adapter": "${run}/one/adapter",
        "trainer.callbacks+": [reads],
        "ckpt_path": "${run}/one/a.ckpt",
    }
    later = {"fit": "selector.yaml", "with": {**given, **wrong}}
    outcome = run_small({"seeds": [0, 1], "stages": {"one": call("one"), "two": later}})
    assert outcome.code == 2
    assert outcome.err.startswith("fedlight: stage two: ")
    assert message in outcome.err
    assert run_small.done == []


class Wants(L.Callback):
    """Has its parser look for a file of an earlier stage."""

    def __init__(self, file: path_type("fr")) -> None: ...


@pytest.mark.parametrize("needs", ["checkpoint", "path"])
def test_files_that_an_earlier_stage_writes_are_not_missed_before_it(needs, run_small, monkeypatch):
    monkeypatch.setattr("fedlight.recipes.steps.Wants", Wants, raising=False)
    wants = {"class_path": "fedlight.recipes.steps.Wants", "init_args": {"file": "${run}/one/rows"}}
    given = {"checkpoint": {"ckpt_path": "${run}/one/a.ckpt"}, "path": {"trainer.callbacks+": [wants]}}
    stages = {"one": call("one"), "two": {"fit": "selector.yaml", "with": given[needs]}}
    outcome = run_small({"seeds": [0], "stages": stages})
    assert run_small.done == ["one"]
    assert "── two" in outcome.err
    assert str(run_small.folder / "out/seed0/one") in outcome.err  # as nobody has written it


@pytest.mark.parametrize("recipe", ["tldr", "fedbiscuit"])
def test_an_even_number_of_selectors_that_would_vote_is_refused_before_any_stage(recipe, tmp_path):
    made = recipes.load(recipe)
    trains = made["stages"]["fedbiscuit"]
    assert trains["fit"] == "fedbiscuit.yaml"
    trains.setdefault("with", {})["model.init_args.num_adapters"] = 4
    message = "stage fedbiscuit_label has 4 selectors vote, .* set num_adapters of stage fedbiscuit to an odd"
    with pytest.raises(ValueError, match=message):
        stages.refuse_tied_votes(recipes.stages(made, tmp_path, 0))
    trains["with"]["model.init_args.num_adapters"] = 5
    stages.refuse_tied_votes(recipes.stages(made, tmp_path, 0))
    outcome = fedlight("run", "tldr", f"--output={tmp_path / 'run'}", "num_selectors=2")
    assert outcome.code == 2
    assert "has 2 selectors vote" in outcome.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("stage", "selectors", "rounds"), [("fedbiscuit", 3, 9), ("fedbiscuit5", 5, 10)])
def test_a_warm_up_without_an_end_is_refused_before_any_stage(stage, selectors, rounds, tmp_path):
    asked = ("run", "fedbiscuit", f"--output={tmp_path / 'run'}", "--seeds=0", f"rounds={rounds}")
    message = f"stage {stage}: the warm-up of {selectors} selectors takes {rounds} rounds"
    assert message in refused(fedlight(*asked))
    assert not [*tmp_path.rglob("settings.json")]


def test_like_when_choose_and_interpolation(run_small):
    recipe = {
        "seeds": [0, 5],
        "big": False,
        "size": "${choose:${big},100,7}",
        "stages": {
            "one": call("one"),
            "left_out": call("left_out", when="${big}"),
            "two": {"like": "one", "with": {"name": "two", "size": "${size}", "seed_": "${seed}"}},
            "like_what_is_left_out": {"like": "left_out", "when": True, "with": {"name": "last"}},
        },
    }
    assert run_small(recipe).code == 0
    assert run_small.done == ["one", "two", "last"] * 2
    assert run_small.results()["rows"] == [{"method": "last", "seed": 0}, {"method": "last", "seed": 5}]
    assert run_small(recipe, "--seeds", "3").code == 0
    assert run_small.done == ["one", "two", "last"]
    assert [row["seed"] for row in run_small.results()["rows"]] == [0, 3, 5]
    (run_small.folder / "out/seed5/two/done.json").write_text("{")
    assert "seed5/two/done.json is damaged" in refused(run_small(recipe, "--seeds", "4"))
    assert run_small.done == []


def test_extends_lays_recipes_over_others_the_later_on_top(run_small):
    base = {"one": call("one"), "two": call("two", when="${x}")}
    run_small({"seeds": [0], "x": 1, "stages": base}, name="base.yaml")
    three = {"three": {"like": "one", "with": {"name": "three"}}}
    shorter = {"extends": "base.yaml", "x": 0, "stages": three}
    assert run_small(shorter, f"--output={run_small.folder / 'other'}", name="short.yaml").code == 0
    assert run_small.done == ["one", "three"]
    run_small({"x": 1, "y": 2, "stages": {"a": call("a${x}")}}, name="first.yaml")
    run_small({"x": 5, "stages": {"b": call("b${product:${x},${y}}")}}, name="second.yaml")
    both = {"extends": ["first.yaml", "second.yaml"], "y": 3, "stages": {}}
    assert run_small(both, f"--output={run_small.folder / 'other'}", name="both.yaml").code == 0
    assert run_small.done == ["a5", "b15"]
    table = (run_small.folder / "other/results.md").read_text().splitlines()
    assert table == ["| method |", "|---|", "| b15 |"]


PAIRED = {"ours": "a", "theirs": 3, "output": "c"}


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"stages": {"one": {"like": "zero"}}}, "stage one is like 'zero', which is no stage before it"),
        ({"stages": {"one": call("one", colour="red")}}, "stage one: give one of fit, validate"),
        ({"stages": {"one": {"with": {}}}}, "stage one: give one of fit, validate"),
        ({"stages": {"one": call("${nope}")}}, "Interpolation key 'nope' not found, in stages.one.with.name"),
        ({"stages": {"one": {"fit": "selectr.yaml"}}}, "stage one: there is no config 'selectr.yaml'"),
        (
            {"stages": {"one": {"call": "fedlight.recipes.steps.no"}}},
            "no function 'fedlight.recipes.steps.no'",
        ),
        (
            {"stages": {"one": {"call": "fedlight.stepps.note"}}},
            "one: there is no function 'fedlight.stepps.note",
        ),
        ({"stages": ["one"]}, "a recipe needs stages"),
        ({}, "a recipe needs stages"),
        ("seeds: [0\nstages: }", "is no YAML"),
        ({"extends": "gone.yaml", "stages": {}}, "there is no recipe"),
        ({"extends": 3, "stages": {}}, "extends=3 has to be the name of a recipe's file, or a list of them"),
        ({"twin": [3], "stages": {}}, "twin=[3] has to be a map"),
        ({"over_seeds": 3, "stages": {}}, "a recipe needs stages"),
        ({"stages": {"../one": call("one")}}, "stage '../one': its name is that of its folder"),
        (
            {"stages": {"one": {**call("one"), "when": "off!"}}},
            "stage one: when='off!' is a text: write true or false",
        ),
        ({"stages": {"one": {"like": ["first"]}}}, "stage one: like=['first'] has to be a name"),
        ({"stages": {"one": {"call": 3}}}, "stage one: call=3 has to be a name"),
        (
            {"stages": {"one": {"call": "fedlight.recipes.steps.pair_answers", "with": PAIRED}}},
            "stage one: pair_answers: theirs=3 must be a text",
        ),
        ({"stages": {"one": {"like": "first", "with": [1]}}}, "stage one: with=[1] has to be a map"),
    ],
)
def test_mistakes_in_a_recipe_are_told_before_any_stage_runs(run_small, recipe, message):
    if isinstance(recipe, dict):
        recipe = {"seeds": [0], **recipe}
        recipe.setdefault("stages", None)
        if isinstance(recipe["stages"], dict):
            recipe["stages"] = {"first": call("first"), **recipe["stages"]}
    outcome = run_small(recipe)
    assert outcome.code == 2
    assert message in outcome.err
    assert "Traceback" not in outcome.err
    assert run_small.done == []


def test_the_command_line_of_recipes(tmp_path):
    told = "there is no recipe 'demoo'; did you mean 'demo'?; there are curious, curious_real, demo"
    assert told in fedlight("run", "demoo").err
    listed = fedlight("run", "--help").out
    assert "demo" in listed
    assert "fedbis" in listed


def test_a_folder_may_have_an_equals_sign_in_its_name(run_small):
    folder = run_small.folder / "lr=0.1"
    assert run_small({"x": 1, "stages": {"a": call("a${x}")}}, "--output", str(folder), "x=2").code == 0
    assert json.loads((folder / "results.json").read_text())["rows"] == [{"method": "a2", "seed": 0}]


def test_the_table_has_a_dash_for_what_was_not_measured():
    rows = [{"method": "raw", "seed": 0, "x": 0.5}, {"method": "oracle", "seed": 0, "x": None}]
    assert summary(rows) == {"raw": {"x": "0.500"}, "oracle": {"x": "-"}}
