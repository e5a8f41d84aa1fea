import json
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from real_rows import ALPACA, MTBENCH, SAFERLHF, SHP, TLDR, TLDR_PROMPTS, UKP
from tiny_world import VOTES, fedlight, make_encoder, read_lines, table, write_rows

from fedlight import conf

CPU = "--trainer.accelerator=cpu"
ONE_VISIT = (
    "fit --federated.clients_per_round=1 --federated.local_steps=1 --trainer.max_epochs=1"
    " --trainer.limit_val_batches=0"
)
SIX = "--data.source=toy:votes?num_clients=6&votes_per_client=10 --data.split.test_source=toy:heldout?num_clients=6&size=6"
TESTS = Path(__file__).parents[1]
AS_THEY_ARE = {  # on the embedded world and model; shorter
    "selector": ONE_VISIT,
    "reward": ONE_VISIT,
    "feddpo": ONE_VISIT,
    "fedavg_chosen": ONE_VISIT,
    "fedbiscuit": f"{ONE_VISIT} --federated.algorithm.warmup_rounds=0 {SIX}",
    "local_only": f"{ONE_VISIT} {SIX}",
    "sft": "fit --trainer.limit_train_batches=1 --trainer.limit_val_batches=1",
    "completions": "predict --data.limit=2 --model.completions.max_new_tokens=3",
    "toy_writer": "fit --trainer.max_epochs=1 --trainer.limit_train_batches=1",
}
PARTS = {
    "parts/toy_instructions": "feddca_star",
    "parts/toy_augmentations": "feddca",
    "parts/toy_few_shot": "curious",
    "parts/toy_betas": "fewfedpit",
    "parts/toy_task": "lora_bench",
    "parts/toy_alphas": "heterogeneity",
    "parts/toy_comparisons": "demo",
    "parts/toy_groups": "fedbiscuit",
    "parts/fedbiscuit": "tldr",
    "parts/five_selectors": "fedbiscuit_table1",
    "parts/shp_data": "shp",
    "parts/polis_groups": "polis",
    "parts/linear_selector": "liars",
    "parts/debates": "fedbis_real",
    "parts/few_real_rows": "fewfedpit_real",
}  # part of recipes -> one that has it
REAL_VOTES = ("ukpconvarg", "ukpconvarg_choice")
BY_THE_RECIPES = ("dpo", "votes", "mtbench")
ELSEWHERE = {  # config -> where it is run
    name: file
    for file, names in {
        "recipes/test_baselines.py": "reward_votes",
        "augmentation/test_augmentation_configs.py": "feddca feddca_star feddca_llama3 projector "
        "data/codealpaca_instructions data/medalpaca_instructions data/fingpt_instructions data/mathinstruct_instructions",
        "conf/test_few_shot_configs.py": "fewfedpit fewfedpit_llama2 fewfedpit_medinstruct",
        "recipes/test_polis_recipe.py": "polis polis_lora",
        "lightning_cli/test_extended_configs.py": "methods/fedbis methods/fedbiscuit methods/feddca methods/fewfedpit",
        "conf/test_task_configs.py": "tasks tasks/gsm8k tasks/human_eval tasks/mmlu_medical tasks/pubmedqa tasks/sentiment",
        "recipes/test_fedbis_real.py": "data/debate_prompts",
    }.items()
    for name in names.split()
}
DATA = {  # command, config, rows, what is passed besides
    "tldr_comparisons": ("fit", "selector", TLDR, ""),
    "shp": ("fit", "selector", SHP, "--data.partition.num_clients=8"),
    "shp_prompts": ("predict", "completions", SHP[:8], ""),
    "mtbench": ("fit", "selector", MTBENCH, ""),
    "alpaca": ("fit", "sft", ALPACA, "--data.partition.num_clients=4"),
    "tldr_prompts": ("predict", "completions", TLDR_PROMPTS, ""),
    "saferlhf_prompts": ("predict", "completions", SAFERLHF, ""),
    "toy_votes": ("fit", "selector", None, f"--data.source={VOTES}"),
    "toy_prompts": ("predict", "completions", None, "--data.limit=2"),
}
RECIPES = {  # recipe -> where it is run
    name: file
    for file, names in {
        "recipes/test_recipes.py": "demo",
        "recipes/test_fedbis_real.py": "fedbis_real",
        "conf/test_configs.py": "fedbis",
        "recipes/test_method_recipes.py": "tldr shp fedbiscuit fedbiscuit_loud reward_hacking",
        "recipes/test_vote_recipes.py": "ukpconvarg mtbench",
        "recipes/test_polis_recipe.py": "polis polis_real",
        "recipes/test_fleets_recipe.py": "fleets",
        "recipes/test_liars_recipe.py": "liars liars_real",
        "recipes/test_private_recipe.py": "private private_methods",
        "recipes/test_lora_bench_recipe.py": "lora_bench lora_bench_instructions",
        "recipes/test_mixed_fleet_recipe.py": "mixed_fleet",
        "recipes/test_domain_recipes.py": "feddca feddca_seeds feddca_star feddca_domains feddca_real heterogeneity",
        "recipes/test_curious_recipe.py": "curious curious_real",
        "recipes/test_leakage_recipe.py": "feddca_leakage",
        "recipes/test_few_shot_recipe.py": "fewfedpit fewfedpit_rule fewfedpit_real",
        "recipes/test_judge_agreement.py": "mt_judges",
        "recipes/test_reproduction.py": "fedbiscuit_table1 fedbiscuit_table2 feddca_table2 fewfedpit_table2 "
        "fewfedpit_table2_medalpaca fewfedpit_table2_medinstruct",
    }.items()
    for name in names.split()
}


def test_every_file_is_run_somewhere():
    here = {*AS_THEY_ARE, *REAL_VOTES, *BY_THE_RECIPES, *ELSEWHERE}
    here |= {f"data/{name}" for name in (*DATA, "ukpconvarg")} | {f"recipes/{name}" for name in RECIPES}
    for recipe, file in RECIPES.items():
        assert f'"{recipe}"' in (TESTS / file).read_text()
    for part, recipe in PARTS.items():
        assert re.search(rf"(?m)^extends: .*\b{part}\.yaml", conf.path(f"recipes/{recipe}.yaml").read_text())
        here.add(f"recipes/{part}")
    for config, file in ELSEWHERE.items():
        name = config.rpartition("/")[2].removesuffix("_instructions")
        assert re.search(rf"\b{name}\b", (TESTS / file).read_text())
    folder = conf.path("")
    # tests/devices
    here |= {str(file.relative_to(folder).with_suffix("")) for file in folder.glob("devices/**/*.yaml")}
    assert {str(file.relative_to(folder).with_suffix("")) for file in folder.rglob("*.yaml")} == here


def run(command, *arguments):
    outcome = fedlight(command, CPU, *arguments)
    assert outcome.code == 0, outcome.err
    return outcome


@pytest.mark.parametrize("name", AS_THEY_ARE)
def test_as_they_are(name, tmp_path):
    command, *changes = AS_THEY_ARE[name].split()
    run(command, f"--config={name}.yaml", f"--trainer.default_root_dir={tmp_path}", *changes)
    assert len(list(tmp_path.iterdir())) >= 1
    if name == "fedbiscuit":
        assert len(table(tmp_path / "groups.csv")) == 6
    if name == "local_only":
        assert {row["stage"] for row in table(tmp_path / "clients.csv")} == {"own"}


@pytest.mark.usefixtures("any_text")
@pytest.mark.parametrize("name", DATA)
def test_data(name, tiny_model, tmp_path):
    command, config, rows, changes = DATA[name]
    arguments = [f"--config={config}.yaml", f"--trainer.default_root_dir={tmp_path / 'run'}"]
    arguments += ["--model.model", tiny_model, "--data", f"data/{name}.yaml", "--data.tokenizer", tiny_model]
    if rows is not None:
        arguments += ["--data.source", write_rows(tmp_path / "rows.jsonl", rows)]
    if command == "fit":
        arguments += ["--data.batch_size=4", "--trainer.max_epochs=1"]
        loop = ["--federated", "FederatedLoop"] if config == "sft" else []
        arguments += [*loop, "--federated.clients_per_round=2", "--federated.local_steps=1"]
    else:
        arguments += ["--model.completions.max_new_tokens=3", "--model.completions.number=1"]
    run(command, *arguments, *changes.split())
    if command == "fit":
        assert len(table(tmp_path / "run/visits.csv")) == 2
    else:
        assert all(len(row["completions"]) == 1 for row in read_lines(tmp_path / "run/completions.jsonl"))


@pytest.mark.usefixtures("any_text")
@pytest.mark.parametrize(
    ("name", "data"), [*((name, None) for name in REAL_VOTES), ("ukpconvarg_choice", "data/ukpconvarg.yaml")]
)
def test_real_votes(name, data, tiny_model, tmp_path):
    model = tiny_model if name == "ukpconvarg_choice" else make_encoder(tmp_path / "encoder")
    held_out = ("firefox-vs-internet-explorer_no", "is-the-school-uniform-a-good-or-bad-idea-_good")
    more = [{**UKP[0], "topic": topic, "response_a": topic} for topic in held_out]
    rows = write_rows(tmp_path / "votes.jsonl", UKP + more)
    arguments = [f"--config={name}.yaml", f"--trainer.default_root_dir={tmp_path / 'run'}"]
    arguments += ["--model.model", model]
    if data is not None:
        arguments += ["--data", data, "--data.tokenizer", model, "--data.format.form", "choice"]
    arguments += [f"--data.source={rows}", f"--data.split.test_source={rows}", "--data.batch_size=4"]
    fast = ["--trainer.max_epochs=1", "--federated.clients_per_round=2", "--federated.local_steps=1"]
    run("fit", *arguments, *fast)
    outcome = run("test", *arguments, f"--model.adapter={tmp_path / 'run/adapter'}", "--trainer.logger=false")
    assert "test/accuracy" in outcome.out


@pytest.mark.slow  # whole runs
@pytest.mark.usefixtures("any_text")
def test_the_recipe_fedbis(tiny_model, tmp_path):
    instructions = OmegaConf.load(conf.path("data/alpaca.yaml"))
    instructions.init_args.source = write_rows(tmp_path / "alpaca.jsonl", ALPACA)
    OmegaConf.save(instructions, tmp_path / "alpaca.yaml")
    files = {"v.jsonl": TLDR, "p.jsonl": TLDR_PROMPTS[:4], "e.jsonl": TLDR_PROMPTS[4:]}
    votes, prompts, evaluation = (write_rows(tmp_path / name, rows) for name, rows in files.items())
    outcome = fedlight(
        *("run", "fedbis", f"--output={tmp_path / 'out'}", f"model={tiny_model}", "sft=true"),
        *("accelerator=cpu", f"instructions={tmp_path / 'alpaca.yaml'}", f"train_source={votes}"),
        *(f"test_source={votes}", f"prompt_source={prompts}", f"eval_source={evaluation}"),
        *("num_prompts=4", "num_eval_prompts=4", "sft_epochs=1", "rounds=1", "clients_per_round=2"),
        *("local_steps=1", "batch_size=4", "completions=2", "max_new_tokens=4", "dpo_epochs=1"),
        *("dpo_lr=0.05", "max_tokens=200", "selector_lr=0.01"),
    )
    assert outcome.code == 0, outcome.err
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert [row["method"] for row in results["rows"]] == ["raw", "FedBis", "longer wins"]
    assert 0 <= results["rows"][1]["win_rate_by_selector"] <= 1
    merged = tmp_path / "out/seed0/merge/model"
    assert (merged / "model.safetensors").exists()
    settings = json.loads((tmp_path / "out/seed0/completions/settings.json").read_text())
    assert settings["model.init_args.model"] == "./seed0/merge/model"  # DPO starts from the instructed model
