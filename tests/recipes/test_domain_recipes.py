import gzip
import json

import pytest
import yaml
from recipe_runs import is_drawn, ran, rows_of, stages_of
from tiny_world import fedlight, make_encoder, read_lines, table, write_rows
from trimmed import trimmed

from fedlight.conf import path as config_file
from fedlight.recipes import recipe as recipes

OPTIMIZERS = ("FedAvg", "FedProx", "SCAFFOLD", "FedAvgM")
NAMES = ("none", "random", "direct", "feddca", "feddca_star", "less", "self_instruct")
METHODS = [
    *("none", "random sampling", "direct retrieval", "FedDCA", "FedDCA without alpha", "FedDCA*", "LESS"),
    "Self-Instruct",
]

CHANGES = (
    *("rounds=1", "clients_per_round=1", "local_steps=1", "batch_size=4", "number=6", "clusters=2"),
    *("lora_rank=2", "accelerator=cpu", "projector_epochs=1", "less_epochs=1", "less_share=0.05"),
    *("less_dimension=64", "source=toy:instructions?seed=${seed}&split=private&client_rows=12"),
    "public_source=toy:instructions?seed=${seed}&split=public&topic_rows=2&chatter=20",
    "test_source=toy:instructions?seed=${seed}&split=test&topic_rows=1",
    "domain_source=toy:instructions?seed=${seed}&split=domain&client_rows=12&topic_rows=2",
)


def run(recipe, folder, *changes):
    outcome = ran("run", recipe, f"--output={folder}", "--seeds", "3", *CHANGES, *changes)
    return rows_of(folder), outcome


def test_every_augmentation_under_every_optimizer(tmp_path):
    found = stages_of("feddca", tmp_path)
    assert {f"{name}_{one.lower()}" for name in NAMES for one in OPTIMIZERS} <= set(found)
    for name in NAMES:  # what is added is found once and shared
        runs = [found[f"{name}_{one.lower()}"].arguments for one in OPTIMIZERS]
        folders = {told["data.init_args.augmentation_folder"] for told in runs}
        assert folders == {str(tmp_path / "augmentations" / name)}
    for name, stage in found.items():
        if name.endswith(tuple(f"_{one.lower()}" for one in OPTIMIZERS)):
            like = found[f"none_{name.rpartition('_')[2]}"].arguments
            changed = {key for key, value in stage.arguments.items() if value != like[key]}
            assert changed <= {"data.init_args.augmentation", "data.init_args.augmentation_folder"}
        if name.endswith("_fedavg"):
            assert not {"federated.algorithm", "federated.server"} & set(stage.arguments)
        if name.endswith("_scaffold"):
            assert stage.arguments["federated.algorithm"]["class_path"] == "Scaffold"


def test_the_projector_of_the_last_epoch_is_read(tmp_path):
    found = stages_of("feddca_star", tmp_path, "projector_epochs=3")
    read = {name: stage.arguments.get("data.init_args.augmentation") for name, stage in found.items()}
    assert read["feddca_star"]["init_args"]["projector"].endswith("/projector/checkpoints/epoch=2.ckpt")
    changed = found["feddca_star_with_positive"].arguments["data.init_args.augmentation.init_args.projector"]
    assert changed.endswith("/projector_with_positive/checkpoints/epoch=2.ckpt")


def test_many_seeds_under_fedavg_are_the_same_stages(tmp_path):
    """Clients side by side are the one difference to the recipe with all optimizers."""
    few, many = (stages_of(name, tmp_path) for name in ("feddca", "feddca_seeds"))
    assert set(many) <= set(few)
    assert len(recipes.load("feddca_seeds")["seeds"]) == 28
    for name in (f"{one}_fedavg" for one in NAMES):
        changed = {key for key, value in many[name].arguments.items() if value != few[name].arguments[key]}
        assert changed == {"federated.clients_at_once"}
    added = few["feddca_without_alpha"].arguments
    assert added["data.init_args.augmentation.init_args.alpha"] is None


@pytest.mark.parametrize("domain", ["code", "medical", "financial", "mathematical"])
def test_the_full_size_projector_learns_all_public_rows(domain, tmp_path):
    """The paper's D^p is all rows of five sets that are no client's: those of the clients' domain as well."""
    found = stages_of("feddca_table2", tmp_path, f"domain={domain}")
    run, learned = (found[name].arguments for name in ("none_fedavg", "projector"))
    sources = {run["data.init_args.source"], *run["data.init_args.public_source"]}
    assert set(learned["data.init_args.source"]) == sources
    assert len(learned["data.init_args.source"]) == len(learned["data.init_args.columns"]) == 5
    assert learned["data.init_args.private"] == run["data.init_args.augmentation_folder"]


def test_clients_of_a_round_count_by_rows(tmp_path):
    for name in ("feddca", "heterogeneity", "feddca_domains", "feddca_table2"):
        for stage in stages_of(name, tmp_path).values():
            algorithm = stage.arguments.get("federated.algorithm", {"init_args": {"weighting": "normalized"}})
            assert algorithm["init_args"]["weighting"] == "normalized"
    config = yaml.safe_load(config_file("methods/feddca.yaml").read_text(encoding="utf-8"))
    assert config["federated"]["init_args"]["algorithm"]["init_args"] == {"weighting": "normalized"}


ARMS = ("none", "random", "direct", "feddca", "feddca_star")


def test_the_recipe_on_a_real_model_differs_between_methods_in_the_augmentation_alone(tmp_path):
    made = stages_of("feddca_real", tmp_path, "rows=rows.jsonl", "others=other")
    found = {name: stage.arguments for name, stage in made.items()}
    fits, tests = ([f"{arm}_{what}" for arm in ARMS] for what in ("fedavg", "test"))
    assert list(found) == ["rows", *fits[:4], "projector", fits[4], "raw_test", *tests, "table"]
    for fit in fits:
        changed = {key for key, value in found[fit].items() if value != found["none_fedavg"][key]}
        assert changed <= {"data.init_args.augmentation", "data.init_args.augmentation_folder"}
    for fit, test in zip(fits, tests, strict=True):
        adapter = str(tmp_path / fit / "adapter")
        assert found[test] == {**found["raw_test"], "model.init_args.adapter": adapter}
    # Who is tested on is on no server, and both encoders of FedDCA* are those of its projector.
    public = found["none_fedavg"]["data.init_args.public_source"]
    assert public == [found["rows"]["public"], "other/eval.jsonl.gz", "other/test.jsonl.gz"]
    assert found["raw_test"]["data.init_args.split.test_source"] == found["rows"]["test"]
    star = found["feddca_star_fedavg"]["data.init_args.augmentation"]["init_args"]
    learned = found["projector"]
    assert star["client_encoder"] == learned["data.init_args.small"]
    assert star["server_encoder"] == learned["data.init_args.large"]
    assert star["client_encoder"]["init_args"] == {"model": "wordllama"}


@pytest.mark.slow
def test_the_twin_of_the_recipe_on_a_real_model(tmp_path, tiny_model):
    rows, outcome = run("feddca_real", tmp_path, "--twin", f"model={tiny_model}")
    assert list(rows) == ["zero-shot", "none", "random sampling", "direct retrieval", "FedDCA", "FedDCA*"]
    columns = {"score", "loss", "perplexity", "knowledge"}
    for method, row in rows.items():
        assert columns < {*row}
        assert (method == "zero-shot") != ("coverage" in row)
    assert rows["FedDCA"]["overlap"] == 1
    assert rows["none"]["loss"] != rows["zero-shot"]["loss"]
    assert "minus FedDCA" in outcome.err


@pytest.mark.slow  # reads the stages of whole recipes
def test_a_dry_run_finds_the_rows_and_what_each_stage_reads_of_another(tmp_path, tiny_model):
    row = {"question": "Why ?", "answer": "So.", "collection": "a", "focus": "all"}
    other = {"instruction": "Add.", "input": "1 2", "output": "3"}
    rows = write_rows(tmp_path / "rows.jsonl", [row])
    for name in ("eval", "test"):
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(json.dumps(other).encode()))
    encoder = make_encoder(tmp_path / "encoder")
    (tmp_path / "encoder/modules.json").write_text("[]")
    changes = [f"model={tiny_model}", f"rows={rows}", f"others={tmp_path}", f"encoder_name={encoder}"]
    changes += [f"small_encoder.init_args.model={encoder}", "template=alpaca"]
    asked = ("run", "feddca_real", "--dry-run", f"--output={tmp_path / 'out'}", *changes)
    assert "nothing is wrong: the run can start" in ran(*asked).out
    found = stages_of("feddca_real", tmp_path, *changes)
    few = [f"stages.{name}.when=false" for name in found if name not in ("rows", "none_fedavg")]
    missing = fedlight(*asked, *few, "others=nowhere")
    assert missing.code != 0
    assert "nowhere/eval.jsonl.gz: no such file" in missing.out


@pytest.mark.slow
def test_feddca(tmp_path, tiny_model):
    others = [f"{name}_{one.lower()}" for name in NAMES if name != "none" for one in OPTIMIZERS[1:]]
    recipe = trimmed("feddca", tmp_path, *others, runs={"none": {}})
    rows, _ = run(recipe, tmp_path, f"model={tiny_model}")
    assert list(rows) == ["zero-shot", *METHODS]
    for method, row in rows.items():
        ran = OPTIMIZERS if method in ("zero-shot", "none") else OPTIMIZERS[:1]
        assert all(0 <= row[optimizer] <= 1 for optimizer in ran)
        assert (method == "zero-shot") != ("coverage" in row)
        assert ("in_domain" in row) == (method in METHODS[1:])
    assert all(rows["none"]["coverage"] <= rows[method]["coverage"] <= 1 for method in METHODS)
    assert rows["Self-Instruct"]["in_domain"] == 1
    folder = tmp_path / "seed3"
    for figure in ("coverage_against_score", "similarities", "map"):
        assert is_drawn(folder / f"{figure}/{figure}.svg")
    assert len(table(folder / "feddca_fedavg/visits.csv")) == 1
    assert len(read_lines(folder / "augmentations/feddca/added.jsonl")) == 10 * 6


@pytest.mark.slow
def test_feddca_star(tmp_path, tiny_model):
    rows, _ = run("feddca_star", tmp_path, f"model={tiny_model}")
    assert list(rows)[:3] == ["none", "FedDCA", "FedDCA*"]
    assert rows["FedDCA"]["overlap"] == 1
    assert all(0 <= row["overlap"] <= 1 for method, row in rows.items() if method != "none")


@pytest.mark.slow
def test_heterogeneity(tmp_path, tiny_model):
    recipe = trimmed("heterogeneity", tmp_path, "none_01", "none_1")
    rows, _ = run(recipe, tmp_path, f"model={tiny_model}", "labels=8")
    alphas = ("0.01", "10")
    assert list(rows)[1:] == [f"none, alpha = {alpha}" for alpha in alphas]
    assert (tmp_path / "seed3/labels_of_clients/labels.svg").is_file()
    # The same private texts in every split, so the same coverage without augmentation.
    assert len({round(rows[f"none, alpha = {alpha}"]["coverage"], 6) for alpha in alphas}) == 1


@pytest.mark.slow
def test_feddca_domains(tmp_path, tiny_model):
    recipe = trimmed("feddca_domains", tmp_path, "none_01", "none_1")
    source = "source=toy:instructions?seed=${seed}&split=private&domain=all&client_rows=3"
    rows, outcome = run(recipe, tmp_path, f"model={tiny_model}", source, "labels=8", "test_rows=1")
    settings = ("none, alpha = 0.01", "none, alpha = 10")
    settings += ("direct retrieval, iid", "direct retrieval, non-iid")
    domains = ("craft", "kitchen", "market", "farm")
    assert list(rows) == [*settings, *(f"{setting}, {domain}" for domain in domains for setting in settings)]
    for setting in settings:
        of_domains = [rows[f"{setting}, {domain}"] for domain in domains]
        for column in ("score", "coverage", "new_topics"):
            assert rows[setting][column] == pytest.approx(sum(row[column] for row in of_domains) / 4)
        assert (setting in settings[:2]) == (rows[setting]["new_topics"] == 0)
    # The same private texts in every split, so the same coverage without augmentation, domain by domain.
    for domain in domains:
        first, second = (rows[f"{setting}, {domain}"]["coverage"] for setting in settings[:2])
        assert first == pytest.approx(second)
    assert all(f"minus {name}" in outcome.err for name in ("none, alpha = 10", "direct retrieval, iid"))
