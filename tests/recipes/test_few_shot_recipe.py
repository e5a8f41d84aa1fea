"""The recipe of FewFedPIT from the first stage to the figures, on an untrained tiny model, which cannot write questions."""

import json

import pytest
from recipe_runs import differing, is_drawn, ran, rows_of, stages_of
from tiny_world import read_lines, table
from trimmed import trimmed

from fedlight.support.files import result_of
from fedlight.toy import rows as fedlight_rows

FEDERATED = (
    "FedAvg",
    "SCAFFOLD",
    "FewFedWeight (our weights)",
    "FedMIT",
    "FewFedPIT, beta = 0.25",
    "FewFedPIT, beta = 0.5",
)
METHODS = ["Centralized", *FEDERATED, "LocIT", "LocIT+SG"]
LEAKS = ("rouge_l", "exact", "secrets", "extracted", "membership")

CHANGES = (
    "accelerator=cpu",
    "rounds=2",
    "clients_per_round=1",
    "local_steps=1",
    "lora_rank=2",
    "number=3",
    "keep=2",
    "epochs=2",
    "epochs_between_attacks=2",
    "asked_every=1",
    "attacked_every=2",
    "asked=4",
    "samples=4",
    "members=4",
    *("writer_rank=2", "writer_epochs=1", "exercises=toy:writing?seed=${seed}&size=32&known=4"),
    # An untrained model's answers have to count, or no client has anything of its own making.
    *("prompts.init_args.instruction.pattern=(?P<instruction>.*)", "synthesis.init_args.keep_cut=true"),
    "prompts.init_args.response.pattern=(?P<response>.*)",
    "source=toy:instructions?seed=${seed}&split=private&client_rows=6&num_clients=2&joined=1",
    "unseen_source=toy:instructions?seed=${seed}&split=test&topic_rows=1&joined=1",
    "test_source=toy:instructions?seed=${seed}&split=test&topic_rows=1",
)


def arguments_of(recipe, folder, *changes):
    return {name: stage.arguments for name, stage in stages_of(recipe, folder, *changes).items()}


def test_baselines_differ_from_the_method_in_what_their_names_say(tmp_path):
    found = arguments_of("fewfedpit", tmp_path)
    assert set(METHODS) < set(found["table"]["methods"])  # whose weights are ours is said in the name
    others = found.keys() - {"exercises", "merge", "zero_shot", "wins", "table", "fewfedpit_50"}
    changed = {name: differing(found["fewfedpit_50"], found[name]) for name in others}
    algorithm = {"federated.algorithm"}
    assert [changed.pop(f"fewfedpit_{beta}") for beta in (0, 25, 75)] == [algorithm] * 3
    assert changed == {
        "centralized": {
            *("federated", "federated.algorithm", "federated.clients_per_round", "federated.local_steps"),
            "federated.limits",
            *("trainer.max_epochs", "trainer.callbacks"),
        },
        "fedavg": algorithm,
        "fedprox": algorithm,
        "scaffold": algorithm | {"model.init_args.optimizer.name", "model.init_args.lr"},
        "fedopt": algorithm | {"federated.server"},
        "fewfedweight": algorithm | {"data.init_args.synthesis"},
        "fedmit": algorithm,
        "locit": algorithm | {"trainer.callbacks"},
        "locit_sg": algorithm | {"trainer.callbacks"},
    }
    for percent in (0, 25, 50, 75):
        algorithm = found[f"fewfedpit_{percent}"]["federated.algorithm"]
        assert algorithm["init_args"]["beta"] == percent / 100


def test_the_recipe_on_a_real_model_differs_between_methods_in_the_algorithm_alone(tmp_path):
    found = arguments_of("fewfedpit_real", tmp_path, "rows=rows.jsonl")
    methods = ("fedavg", "fewfedpit_0", "fewfedpit_25", "fewfedpit_50", "fewfedpit_75")
    first, last = ("shots", "zero_shot", "fewfedpit_50", "fedavg"), ("local", "table", "forgetting")
    assert list(found) == [*first, *methods[1:3], methods[4], *last]
    ours = found["fewfedpit_50"]
    for name in methods:
        assert found[name] == {**ours, "federated.algorithm": found[name]["federated.algorithm"]}
    # Alone, each client trains for as many steps as it does in a federation, on average.
    for told in (found["local"], found["fedavg"]):
        assert told["trainer.max_epochs"] * told["federated.clients_per_round"] == 18
    assert ours["data.init_args.source"] == found["shots"]["train"]
    assert ours["data.init_args.synthesis"]["init_args"]["prompts"] is None
    for attack in ours["trainer.callbacks"]:
        if attack["class_path"] == "DiscoverableMemorization":
            assert attack["init_args"]["matching"] == "record number of the patient"


@pytest.mark.slow
def test_the_twin_of_the_recipe_on_a_real_model(tmp_path, tiny_model):
    changes = [*CHANGES, f"model={tiny_model}", "clients=2"]
    changes = [one for one in changes if not one.startswith(("unseen", "epochs", "members"))]
    ran("run", "fewfedpit_real", "--twin", f"--output={tmp_path}", "--seeds", "3", *changes)
    rows = rows_of(tmp_path)
    betas = [f"FewFedPIT, beta = {beta}" for beta in ("0", "0.25", "0.5", "0.75")]
    assert list(rows) == ["pre-trained", "FedAvg", *betas, "local"]
    assert {"rouge_l", "exact", "extracted", "responses"} < set(rows["FedAvg"])
    lost = {method: row["perplexity_elsewhere"] for method, row in rows.items() if "knowledge" in row}
    assert list(lost) == ["pre-trained", "FedAvg", *betas]
    assert len({*lost.values()}) > 1


@pytest.mark.slow
def test_fewfedpit(tmp_path, tiny_model):
    recipe = trimmed("fewfedpit", tmp_path, "fedprox", "fedopt", "fewfedpit_0", "fewfedpit_75")
    ran("run", recipe, f"--output={tmp_path}", "--seeds", "3", *CHANGES, f"model={tiny_model}")
    rows = rows_of(tmp_path)
    assert list(rows) == ["pre-trained", *METHODS]
    for method, row in rows.items():
        assert 0 <= row["utility"] <= 1
        assert all((name in row) == (not method.startswith("LocIT")) for name in LEAKS)
        uploads = method not in ("pre-trained", "Centralized", "LocIT", "LocIT+SG")
        assert ("secrets of uploads" in row) == uploads
    assert rows["FedAvg"]["tie"] == 1  # against itself
    seed = tmp_path / "seed3"
    assert len(list((seed / "fewfedpit_50/synthetic").glob("round_*.jsonl"))) == 2
    assert not (seed / "fedavg/synthetic").exists()
    attacked = table(seed / "fewfedpit_25/attacks/attacks.csv")
    assert {row["round"] for row in attacked if row["target"] == "global"} == {"0", "1", "2"}
    for figure in ("trade_off", "leakage", "leakage_of_uploads", "secrets"):
        assert is_drawn(tmp_path / f"seeds_3/{figure}/{figure}.svg")


def test_private_steps_are_matched_by_the_servers_learning_rate(tmp_path):
    """FedAvg's rate is beta, or FewFedPIT's 1 / beta; nothing else differs."""
    found = arguments_of("fewfedpit_rule", tmp_path, "more=true")
    for percent in (25, 50, 75):
        beta = percent / 100
        step, full, ours = (found[f"{name}_{percent}"] for name in ("step", "full", "fewfedpit"))
        assert step == {**found["fedavg"], "federated.server": step["federated.server"]}
        assert full == {**ours, "federated.server": full["federated.server"]}
        assert ours["federated.algorithm"] == {"class_path": "FewFedPIT", "init_args": {"beta": beta}}
        for arguments, rate in ((step, beta), (full, 1 / beta)):
            assert arguments["federated.server"]["class_path"] == "Average"
            assert arguments["federated.server"]["init_args"]["lr"] == pytest.approx(rate, rel=1e-12)
    domains = {"ood": ["market", "farm", "chatter"], "simd": ["craft"], "ideal": ["kitchen"]}
    for name, where in domains.items():
        other = found[name]["data.init_args.synthesis"]
        assert other["init_args"]["where"]["domain"] == where
        assert found[name] == {**found["fewfedpit_50"], "data.init_args.synthesis": other}
        assert other["init_args"]["number"] == found["fewfedpit_50"]["data.init_args.keep"]


RULE_CHANGES = (
    *("accelerator=cpu", "rounds=2", "clients_at_once=1", "clients_per_round=1", "local_steps=1"),
    *("lora_rank=2", "number=3", "keep=2", "epochs=1", "asked_every=1", "asked=4", "samples=4", "members=4"),
    "writer_rank=2",
    "writer_epochs=1",
    "exercises=toy:writing?seed=${seed}&size=32&known=4&rule=1&instructed=1",
    "instruction_tries=6",
    "more=true",
    "prompts.init_args.instruction.pattern=(?P<instruction>.*)",
    "synthesis.init_args.keep_cut=true",
    "prompts.init_args.response.pattern=(?P<response>.*)",
    "source=toy:instructions?seed=${seed}&split=private&client_rows=8&num_clients=2&joined=1&rule=1&written=2",
    "unseen_source=toy:instructions?seed=${seed}&split=test&topic_rows=1&joined=1&rule=1",
    "test_source=toy:instructions?seed=${seed}&split=test&topic_rows=1&rule=1",
)


@pytest.mark.slow
def test_fewfedpit_rule(tmp_path, tiny_model):
    gone = ("fedmit", "fewfedpit_0", "fewfedpit_25", "fewfedpit_75", "locit", "locit_sg")
    gone += ("step_25", "step_75", "full_25", "full_75")
    recipe = trimmed("fewfedpit_rule", tmp_path, *gone)
    loaded = json.loads((tmp_path / "fewfedpit_rule.yaml").read_text())
    rows = set(loaded["stages"]["table"]["with"]["methods"])
    loaded["stages"]["table"]["with"]["not_attacked"] = []
    figures = loaded["over_seeds"]
    for figure, stage in list(figures.items()):
        if "pairs" in stage["with"]:
            pairs = stage["with"]["pairs"]
            stage["with"]["pairs"] = {name: pair for name, pair in pairs.items() if set(pair) <= rows}
            if not stage["with"]["pairs"]:
                del figures[figure]
    (tmp_path / "fewfedpit_rule.yaml").write_text(json.dumps(loaded))
    ran("run", recipe, f"--output={tmp_path}", "--seeds", "3", *RULE_CHANGES, f"model={tiny_model}")
    found = rows_of(tmp_path)
    assert set(found) == {"pre-trained", *rows}
    assert {"+OOD", "+SIMD", "+IDEAL", "FedAvg, server lr = 0.5"} <= rows
    assert all({"facts", "secrets", "facts of uploads"} <= set(found[name]) for name in ("FedAvg", "+OOD"))
    for name, domains in (("ood", {"chatter", "market", "farm"}), ("ideal", {"kitchen"})):
        made = read_lines(tmp_path / f"seed3/{name}/synthetic/round_0001.jsonl")[1:]
        assert len(made) == 2  # of one client
        public = fedlight_rows("instructions", seed=3, split="public", joined=1, rule=1)
        of = {(row["instruction"], row["output"]): row["domain"] for row in public}
        assert {of[row["fields"]["instruction"], row["fields"]["response"]] for row in made} <= domains
    for name, pair in (("matched", "β = 0.5, step x 0.5"), ("full_step", "β = 0.5, full step")):
        assert [row["pair"] for row in result_of(tmp_path / f"seeds_3/{name}")["rows"]] == [pair]
    for figure in ("trade_off", "matched", "full_step", "figure_4a", "claims", "claims_facts", "leakage"):
        assert is_drawn(tmp_path / f"seeds_3/{figure}/{figure}.svg")
