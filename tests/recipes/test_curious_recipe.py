import pytest
from recipe_runs import differing, is_drawn, ran, rows_of, stages_of
from tiny_world import table

from fedlight.support.files import result_of

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
    stages = stages_of("curious", tmp_path)
    told = {name: stages[name].arguments for name in RUNS}
    of_few = told["fedavg"].keys() & differing(told["fedavg"], told["fewfedpit_50"])
    assert of_few == {"federated.algorithm"}
    assert differing(told["fedavg"], told["fedavg_trained"]) == {"trainer.callbacks"}
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
    stages = stages_of("curious_real", tmp_path, "rows=r")
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
@pytest.mark.parametrize("of_recipe", [("curious",), ("curious_real", "--twin")], ids=lambda words: words[0])
def test_curious(tmp_path, tiny_model, of_recipe):
    ran("run", *of_recipe, f"--output={tmp_path}", "--seeds", "3", *TINY, f"model={tiny_model}")
    rows = rows_of(tmp_path)
    methods = ["pre-trained", "FedAvg", "FedAvg, attacker trains", "FedDCA", "FewFedPIT, beta = 0.5"]
    assert list(rows) == methods
    for method, row in rows.items():
        assert all(0 <= row[name] <= 1 for name in ("utility", "secrets found", "by chance"))
        assert ("membership, LiRA" in row) == (method != "FedAvg, attacker trains")
    uploads = result_of(tmp_path / "seed3/uploads")["rows"]
    assert [row["method"] for row in uploads] == ["FedAvg", "FedDCA", "FewFedPIT, beta = 0.5"]
    assert all(0 <= row["membership, Min-K% of uploads"] <= 1 for row in uploads)
    for run in RUNS:
        attacked = table(tmp_path / f"seed3/{run}/attacks/attacks.csv")
        on_server = [row for row in attacked if row["target"] == "global"]
        assert [row["round"] for row in on_server] == ["0", "1", "2"]
        assert all(float(row["client_extraction/queries"]) > 0 for row in on_server)
        assert (len(attacked) > 3) == (run != "fedavg_trained")
    # The attacker that trains sees the same federation.
    plain, trained = (result_of(tmp_path / f"seed3/{run}")["metrics"] for run in RUNS[1:3])
    assert plain["score/domain"] == trained["score/domain"]
    assert all(is_drawn(tmp_path / f"seeds_3/{name}/{name}.svg") for name in ("coverage", "membership"))
