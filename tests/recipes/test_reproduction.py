"""The recipes of the papers' tables: their values, and twins with the same stages on the embedded world."""

import json
from pathlib import Path

import datasets
import pytest
from recipe_runs import ran, rows_of, stages_of
from tiny_world import EVAL_PROMPTS, fedlight, refused

from fedlight import conf

TABLES = {
    **{"fedbiscuit_table1": 47, "fedbiscuit_table2": 47, "feddca_table2": 36, "fewfedpit_table2": 16},
    "fewfedpit_table2_medalpaca": 16,
}
ONLY_LARGE = {"sft", "merge"}  # a large model is tuned on Alpaca before it is federated
ONLY_SMALL = {"exercises", "merge"}  # the tiny model is taught to write


def stages(name, *changes, twin=False):
    return stages_of(name, Path("/run"), *changes, twin=twin)


@pytest.fixture(scope="module")
def loaded():
    return {(name, twin): stages(name, twin=twin) for name in TABLES for twin in (False, True)}


@pytest.mark.parametrize("name", TABLES)
def test_a_twin_has_the_same_stages(loaded, name):
    large, small = ({*loaded[name, twin]} for twin in (False, True))
    different = {"fedb": ONLY_LARGE, "fewf": ONLY_SMALL}.get(name[:4], set())
    assert large ^ small == different
    assert len(large & small) == TABLES[name] - len(different & large & small)
    for stage in large & small:
        one, other = (loaded[name, twin][stage] for twin in (False, True))
        assert (one.command, one.target) == (other.command, other.target)
        assert {*one.arguments} == {*other.arguments}


@pytest.mark.parametrize("name", TABLES)
def test_a_twin_needs_nothing_from_elsewhere(loaded, name):
    said = json.dumps([stage.arguments for stage in loaded[name, True].values()])
    elsewhere = ("meta-llama", "google/", "Qwen", "sentence-transformers", "BAAI", "http", "tatsu-lab")
    assert [word for word in (*elsewhere, "ChatEndpoint") if word in said] == []


@pytest.mark.parametrize(("name", "toy"), [("feddca_table2", "feddca"), ("fewfedpit_table2", "fewfedpit")])
def test_a_twin_is_the_recipe_of_the_embedded_world(loaded, name, toy):
    """But for settings that stand in a config there and in the recipe here."""
    for stage, other in stages(toy).items():
        ours, theirs = loaded[name, True][stage].arguments, other.arguments
        known = set(theirs) - {"trainer.callbacks", "data.init_args.tasks", "methods", "attacks"}
        assert {key: ours[key] for key in known} == {key: theirs[key] for key in known}, stage


def test_the_papers_values_are_in_their_places(loaded):
    feddca = loaded["feddca_table2", False]
    run = feddca["feddca_fedavg"].arguments
    assert run["data.init_args.batch_size"] * run["trainer.accumulate_grad_batches"] == 32
    values = {
        "trainer.max_epochs": 30,
        "federated.clients_per_round": 2,
        "federated.local_steps": 10,
        "model.init_args.lr": 5e-5,
        "model.init_args.lora.rank": 16,
        "model.init_args.lora.alpha": 16,
    }
    assert {key: run[key] for key in values} == values
    chosen = run["data.init_args.augmentation"]["init_args"]
    assert (chosen["clusters"], chosen["alpha"], chosen["number"]) == (10, 0.7, 5000)
    assert feddca["feddca_without_alpha"].arguments["data.init_args.augmentation.init_args.alpha"] is None
    few = loaded["fewfedpit_table2", False]["fewfedpit_50"].arguments
    values = {"model.init_args.base": "int8", "trainer.max_epochs": 30, "data.init_args.keep": 16}
    assert {key: few[key] for key in values} == values
    assert few["data.init_args.partition"] == {"by": "dirichlet", "num_clients": 50, "alpha": 1.0}
    silo = stages("fewfedpit_table2_medinstruct")["fewfedpit_50"].arguments
    assert (silo["data.init_args.partition"]["num_clients"], silo["trainer.max_epochs"]) == (10, 10)
    shots = silo["data.init_args.rows.few_shot"]
    assert shots["per_cluster"] * shots["clusters"] == 500
    bis = loaded["fedbiscuit_table2", False]["fedbiscuit"].arguments
    assert bis["data.init_args.batch_size"] * bis["trainer.accumulate_grad_batches"] == 32
    assert (bis["federated.clients_per_round"], bis["federated.algorithm.regroup_every"]) == (10, 100)
    assert bis["data"] == "data/shp.yaml"


@pytest.mark.parametrize("name", ["tldr", "shp", "fedbiscuit_table1", "fedbiscuit_table2"])
def test_pooled_votes_are_trained_on_for_as_many_steps_as_in_a_federation(name):
    found = stages(name)
    told, pooled = (found[stage].config() for stage in ("selector", "pooled"))
    accumulated = pooled["trainer"].get("accumulate_grad_batches", 1)
    assert accumulated == told["trainer"].get("accumulate_grad_batches", 1)
    steps = (
        told["federated"]["init_args"]["clients_per_round"] * told["federated"]["init_args"]["local_steps"]
    )
    assert pooled["trainer"]["limit_train_batches"] == steps * accumulated


@pytest.mark.parametrize(
    "name", ["fewfedpit_table2", "fewfedpit_table2_medalpaca", "fewfedpit_table2_medinstruct"]
)
def test_local_methods_train_every_client(name):
    found = stages(name)
    for stage in ("locit", "locit_sg"):
        arguments = found[stage].arguments
        clients = arguments["data.init_args.partition"]["num_clients"]
        assert arguments["federated.clients_per_round"] == clients
        assert arguments["trainer.max_epochs"] == found["centralized"].arguments["trainer.max_epochs"]


def test_the_judges_requests_in_the_header_are_those_of_the_recipe(loaded):
    """Each answer of a model, and of each client's own, is asked about in both positions."""
    found, prompts = loaded["fewfedpit_table2", False], 805
    names = [Path(folder).name for folder in found["wins"].arguments["methods"].values()]
    clients = found["fewfedpit_50"].arguments["data.init_args.partition"]["num_clients"]
    own = sum(
        any(one.get("init_args", {}).get("own_models") for one in found[name].arguments["trainer.callbacks"])
        for name in names
    )
    requests = 2 * prompts * (len(names) - own + own * clients)
    told = f"{requests:,} requests, of {prompts} prompts in both positions for {len(names) - own} models"
    assert told in conf.path("recipes/fewfedpit_table2.yaml").read_text()


def test_medalpaca_is_tested_on_400_rows_from_which_none_is_drawn(loaded):
    found = loaded["fewfedpit_table2_medalpaca", False]["fewfedpit_50"].arguments
    scores = next(one for one in found["trainer.callbacks"] if one["class_path"].endswith("TaskScores"))
    rows = scores["init_args"]["tasks"]["domain"]["init_args"]["data"]["init_args"]
    assert (rows["source"], rows["share"]) == (found["data.init_args.source"], None)
    kept = datasets.Dataset.from_dict({"row": range(1000)})
    train, test = (
        datasets.ReadInstruction.from_spec(spec).to_absolute({"train": len(kept)})
        for spec in (found["data.init_args.split.train_split"], rows["split"])
    )
    assert [(one.from_, one.to) for one in test + train] == [(0, 400), (400, 1000)]


@pytest.mark.parametrize("twin", [False, True])
@pytest.mark.parametrize(
    "name", [*(name for name in TABLES if "fedbiscuit" not in name), "fewfedpit_table2_medinstruct"]
)
def test_scaffold_and_it_alone_trains_with_sgd(name, twin):
    """Under AdamW its controls are estimates with which nothing is learned."""
    found = {stage: one.arguments for stage, one in stages(name, twin=twin).items()}
    found = {stage: told for stage, told in found.items() if "federated.algorithm" in told}
    scaffold = [a for a in found.values() if a["federated.algorithm"]["class_path"] == "Scaffold"]
    assert len(scaffold) == (7 if name == "feddca_table2" else 1)
    for arguments in scaffold:
        assert arguments["model.init_args.optimizer.name"] == "SGD"
        assert arguments["model.init_args.lr"] >= 0.1
        assert arguments["trainer.gradient_clip_val"] == 1.0
    for stage, arguments in found.items():
        if "scaffold" not in stage:
            assert "model.init_args.optimizer.name" not in arguments


@pytest.mark.parametrize("domain", ["code", "medical", "financial", "mathematical"])
@pytest.mark.parametrize("template", ["alpaca", "alpaca_joined"])
def test_training_less_and_the_tests_have_one_template(domain, template):
    """A model that is asked in another format than it was trained in is worth less than it could be."""

    def named(value):
        told = [value["template"]] if isinstance(value, dict) and "template" in value else []
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return sum(map(named, inside), told)

    found = stages("feddca_table2", f"domain={domain}", f"template={template}")
    assert found["none_fedavg"].arguments["data.init_args.template"] == template
    for stage in ("zero_shot", "none_fedavg", "less_fedavg"):
        texts = named(found[stage].arguments)
        assert texts
        assert {*texts} == {template}
    assert found["less_fedavg"].arguments["data.init_args.augmentation"]["init_args"]["template"] == template


def test_sweeps_come_before_the_results():
    found = stages("feddca_table2", "sweeps=true")
    parts = ("fifth", "two_fifths", "three_fifths", "clusters_8")
    data = [found[f"feddca_{part}"].config()["data"]["init_args"] for part in parts]
    asked = [told["augmentation"]["init_args"] for told in data]
    assert [told["number"] for told in asked] == [1000, 2000, 3000, 5000]
    assert [told["clusters"] for told in asked] == [10, 10, 10, 80]
    assert list(found)[-1] == "tables"
    assert found["tables"].arguments["methods"] == found["table"].arguments["methods"]


def test_a_recipe_without_a_twin_or_a_stage_says_what_there_is():
    line = refused(fedlight("run", "demo", "--twin"))
    assert "the recipe demo has no twin; curious_real, fedbis_real, " in line
    line = refused(fedlight("run", "fedbiscuit", "stages.pooledd.when=false", "--dry-run"))
    assert "the recipe fedbiscuit has no stage 'pooledd'; its stages are sft, merge, selec" in line


def test_a_twin_runs(tmp_path, tiny_model):
    """The part of a twin that no other recipe has: answers to a task, judged by the oracle."""
    left_out = [
        f"stages.{name}.when=false"
        for name in stages("fedbiscuit_table1", twin=True)
        if name not in ("judged_raw", "judged_fedbis", "table")
    ]
    file = tmp_path / "part.yaml"
    part = {"table": {"with": {"methods": None, "labels": None}}}
    file.write_text(json.dumps({"extends": str(conf.path("recipes/fedbiscuit_table1.yaml")), "stages": part}))
    ran(
        *("run", str(file), "--twin", f"--output={tmp_path / 'out'}", *left_out, f"model={tiny_model}"),
        *(f"policy_model={tiny_model}", "accelerator=cpu", "answer_limit=6", "max_new_tokens=6"),
        *(f"answer_source={EVAL_PROMPTS}", "stages.judged_fedbis.with={model.init_args.adapter: null}"),
        "stages.table.with.methods={raw: '${run}/judged_raw', FedBis: '${run}/judged_fedbis'}",
    )
    rows = rows_of(tmp_path / "out")
    assert {name: (row["tie"], row["pairs"]) for name, row in rows.items()} == dict.fromkeys(rows, (1, 6))
    assert [*rows] == ["raw", "FedBis"]
