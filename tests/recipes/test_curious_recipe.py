import json

import pytest
from tiny_world import fedlight, table

from fedlight.recipes import recipe as recipes

TINY = (
    *("rounds=2", "clients_per_round=1", "local_steps=1", "lora_rank=2", "accelerator=cpu", "attack_every=1"),
    *("samples=3", "members=4", "number=3", "keep=2", "public_number=2", "steps=1"),
    *("writer_rank=2", "writer_epochs=1", "exercises=toy:writing?seed=${seed}&size=32&known=4"),
    # An untrained model's answers have to count, or no client has anything of its own making.
    *("prompts.init_args.instruction.pattern=(?P<instruction>.*)", "synthesis.init_args.keep_cut=true"),
    "prompts.init_args.response.pattern=(?P<response>.*)",
    "source=toy:instructions?seed=${seed}&split=private&client_rows=6&num_clients=3&joined=1",
    "public_source=toy:instructions?split=public&topic_rows=2&chatter=0&joined=1",
    "unseen_source=toy:instructions?seed=${seed}&split=test&topic_rows=1&joined=1",
    "test_source=toy:instructions?seed=${seed}&split=test&topic_rows=1",
)
RUNS = ("fewfedpit_50", "fedavg", "fedavg_trained", "feddca")


def test_methods_are_attacked_alike_in_equal_federations(tmp_path):
    stages = {stage.name: stage for stage in recipes.stages(recipes.load("curious"), tmp_path, 1)}
    told = {name: stages[name].arguments for name in RUNS}
    differing = {key for key in told["fedavg"] if told["fedavg"][key] != told["fewfedpit_50"].get(key)}
    assert differing == {"federated.algorithm"}
    differing = {key for key in told["fedavg"] if told["fedavg"][key] != told["fedavg_trained"][key]}
    assert differing == {"trainer.callbacks"}
    shared = {key for key in told["fedavg"] if told["fedavg"][key] == told["feddca"].get(key)}
    assert shared > {
        *("trainer.callbacks", "trainer.max_epochs", "model.init_args.model", "model.init_args.lr"),
        *("data.init_args.source", "data.init_args.rows.canaries", "data.init_args.batch_size"),
        *("federated.clients_per_round", "federated.local_steps"),
    }
    asks, trains = (told[name]["trainer.callbacks"][4] for name in ("fedavg", "fedavg_trained"))
    assert asks["class_path"] == trains["class_path"] == "ClientExtraction"
    assert trains["init_args"] == {**asks["init_args"], "steps": 10, "lr": 0.001}
    for name in ("data.init_args.template", "data.init_args.max_tokens", "trainer.gradient_clip_val"):
        given = {run: stages[run].config() for run in ("fedavg", "feddca")}
        for part in name.split("."):
            given = {run: value[part] for run, value in given.items()}
        assert given["fedavg"] == given["feddca"]


def test_the_recipe_on_a_real_model_attacks_the_same_methods_in_the_same_world(tmp_path):
    stages = {
        stage.name: stage for stage in recipes.stages(recipes.load("curious_real", ["rows=r"]), tmp_path, 1)
    }
    assert list(stages) == ["shots", "zero_shot", *RUNS, "uploads", "table"]
    told = {name: stages[name].arguments for name in RUNS}
    assert {told[name]["data.init_args.source"] for name in RUNS} == {stages["shots"].arguments["train"]}
    for name in ("model.init_args.dtype", "data.init_args.template", "data.init_args.max_tokens"):
        assert told["fedavg"][name] == told["feddca"][name]
    assert told["feddca"]["data.init_args.public_source"] == stages["shots"].arguments["public"]
    asks, trains = (told[name]["trainer.callbacks"][4]["init_args"] for name in ("fedavg", "fedavg_trained"))
    assert trains == {**asks, "steps": 10, "lr": 0.001}
    assert asks["max_new_tokens"] == 16


@pytest.mark.slow
@pytest.mark.parametrize(
    "of_recipe", [("curious",), ("curious_real", "--twin")], ids=["curious", "curious_real"]
)
def test_curious(tmp_path, tiny_model, of_recipe):
    arguments = ("run", *of_recipe, f"--output={tmp_path}", "--seeds", "3", *TINY, f"model={tiny_model}")
    outcome = fedlight(*arguments)
    assert outcome.code == 0, outcome.err
    rows = {row["method"]: row for row in json.loads((tmp_path / "results.json").read_text())["rows"]}
    methods = ["pre-trained", "FedAvg", "FedAvg, attacker trains", "FedDCA", "FewFedPIT, beta = 0.5"]
    assert list(rows) == methods
    for method, row in rows.items():
        assert all(0 <= row[name] <= 1 for name in ("utility", "secrets found", "by chance"))
        assert ("membership, LiRA" in row) == (method != "FedAvg, attacker trains")
    uploads = json.loads((tmp_path / "seed3/uploads/done.json").read_text())["result"]["rows"]
    assert [row["method"] for row in uploads] == ["FedAvg", "FedDCA", "FewFedPIT, beta = 0.5"]
    assert all(0 <= row["membership, Min-K% of uploads"] <= 1 for row in uploads)
    for run in RUNS:
        attacked = table(tmp_path / f"seed3/{run}/attacks/attacks.csv")
        on_server = [row for row in attacked if row["target"] == "global"]
        assert [row["round"] for row in on_server] == ["0", "1", "2"]
        assert all(float(row["client_extraction/queries"]) > 0 for row in on_server)
        assert (len(attacked) > 3) == (run != "fedavg_trained")
    # The attacker that trains sees the same federation.
    scores = [
        json.loads((tmp_path / f"seed3/{run}/done.json").read_text())["result"]["metrics"]["score/domain"]
        for run in ("fedavg", "fedavg_trained")
    ]
    assert scores[0] == scores[1]
    for figure in ("coverage", "membership"):
        assert "<svg" in (tmp_path / f"seeds_3/{figure}/{figure}.svg").read_text()[:1000]
