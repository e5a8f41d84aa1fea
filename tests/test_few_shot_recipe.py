"""The recipe of FewFedPIT from the first stage to the figures, on an untrained tiny model, which cannot write questions."""

import json

import pytest
from tiny_world import fedlight, table
from trimmed import trimmed

from fedlight.recipes import recipe as recipes

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
    *(
        "accelerator=cpu",
        "rounds=2",
        "clients_per_round=1",
        "local_steps=1",
        "lora_rank=2",
        "number=3",
        "keep=2",
    ),
    *(
        "epochs=2",
        "epochs_between_attacks=2",
        "asked_every=1",
        "attacked_every=2",
        "asked=4",
        "samples=4",
        "members=4",
    ),
    *("writer_rank=2", "writer_epochs=1", "exercises=toy:writing?seed=${seed}&size=32&known=4"),
    # An untrained model's answers have to count, or no client has anything of its own making.
    *("prompts.init_args.instruction_pattern=(?P<instruction>.*)", "synthesis.init_args.keep_cut=true"),
    "prompts.init_args.response_pattern=(?P<response>.*)",
    "source=toy:instructions?seed=${seed}&split=private&client_rows=6&num_clients=2&joined=1",
    "unseen_source=toy:instructions?seed=${seed}&split=test&topic_rows=1&joined=1",
    "test_source=toy:instructions?seed=${seed}&split=test&topic_rows=1",
)


def test_baselines_differ_from_the_method_in_what_their_names_say(tmp_path):
    found = {stage.name: stage.arguments for stage in recipes.stages(recipes.load("fewfedpit"), tmp_path, 1)}
    assert set(METHODS) < set(
        found["table"]["methods"]
    )  # a baseline whose weights are ours says so in its name
    ours = found["fewfedpit_50"]
    changed = {
        name: {
            key
            for key in {**ours, **arguments}
            if ours.get(key, "as it is") != arguments.get(key, "as it is")
        }
        for name, arguments in found.items()
        if name not in ("exercises", "merge", "zero_shot", "wins", "table", "fewfedpit_50")
    }
    algorithm = {"federated.algorithm"}
    assert [changed.pop(f"fewfedpit_{beta}") for beta in (0, 25, 75)] == [algorithm] * 3
    assert changed == {
        "centralized": {
            *("federated", "federated.algorithm", "federated.clients_per_round", "federated.local_steps"),
            *("trainer.max_epochs", "trainer.callbacks"),
        },
        "fedavg": algorithm,
        "fedprox": algorithm,
        "scaffold": algorithm | {"model.init_args.optimizer", "model.init_args.lr"},
        "fedopt": algorithm | {"federated.server"},
        "fewfedweight": algorithm | {"data.init_args.synthesis"},
        "fedmit": algorithm,
        "locit": algorithm | {"trainer.callbacks"},
        "locit_sg": algorithm | {"trainer.callbacks"},
    }
    betas = {
        name: found[name]["federated.algorithm"]["init_args"]["beta"]
        for name in found
        if "fewfedpit_" in name
    }
    assert all(beta == int(name.rpartition("_")[2]) / 100 for name, beta in betas.items())


@pytest.mark.slow
def test_fewfedpit(tmp_path, tiny_model):
    recipe = trimmed("fewfedpit", tmp_path, "fedprox", "fedopt", "fewfedpit_0", "fewfedpit_75")
    arguments = ("run", recipe, f"--output={tmp_path}", "--seeds", "3", *CHANGES, f"model={tiny_model}")
    outcome = fedlight(*arguments)
    assert outcome.code == 0, outcome.err
    rows = {row["method"]: row for row in json.loads((tmp_path / "results.json").read_text())["rows"]}
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
        assert "<svg" in (tmp_path / f"seeds_3/{figure}/{figure}.svg").read_text()[:1000]
    assert "──" not in fedlight(*arguments).err
