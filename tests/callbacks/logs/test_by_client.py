import pytest
from tiny_world import fedlight, table, tiny_selector

from fedlight.evaluation.by_client import spread

GROUP_LOG = "--trainer.callbacks+=fedlight.callbacks.logs.group_log.GroupLog"
ACCURACY = "--trainer.callbacks+=fedlight.callbacks.logs.client_accuracy.ClientAccuracy"
FEDBISCUIT = (
    *("--model.num_adapters=3", "--model.lr=0.05", "--data.split.val_share=0.3"),
    "--federated.algorithm=fedlight.federation.algorithms.fedbiscuit.FedBiscuit",
    *("--federated.algorithm.warmup_rounds=1", "--federated.algorithm.regroup_every=1"),
)


@pytest.fixture(scope="module")
def run(tiny_model, tmp_path_factory):
    """The folder of five rounds, of which 0 to 2 are warm-up."""
    folder = tmp_path_factory.mktemp("run")
    arguments = tiny_selector(tiny_model, folder, *FEDBISCUIT, "--trainer.max_epochs=5", GROUP_LOG, ACCURACY)
    outcome = fedlight("fit", *arguments)
    assert outcome.code == 0, outcome.err
    return folder


def test_groups_and_accuracies_of_every_round(run):
    groups, clients = table(run / "groups.csv"), table(run / "clients.csv")
    assert [(row["round"], row["client"]) for row in groups] == [
        (r, f"c00{i}") for r in "34" for i in range(6)
    ]
    assert sorted(row["selector"] for row in groups[:6]) == list("001122")
    assert {row["known_group"] for row in groups} == {"thorough", "warm", "terse"}
    for row in groups:  # sizes are balanced, so not all have their best
        losses = [float(row[f"loss_{u}"]) for u in range(3)]
        assert len(set(losses)) == 3
    assert [row["round"] for row in clients] == [r for r in "01234" for _ in range(6)]
    assert [row["selector"] for row in clients[:18]] == [""] * 18
    assert [row["selector"] for row in clients[18:]] == [row["selector"] for row in groups]
    assert [row["group"] for row in clients[18:]] == [row["known_group"] for row in groups]
    (metrics,) = run.glob("metrics/*/metrics.csv")
    logged = {name: value for row in table(metrics) for name, value in row.items() if value}
    own = spread([float(row["own_accuracy"]) for row in clients[24:]], 0.1)
    assert {name: float(logged[f"val/own_{name}"]) for name in own} == pytest.approx(own, abs=1e-6)
    assert float(logged["fed/group_ari"]) <= 1


def test_the_test_knows_the_groups_of_the_run(run, tiny_model, tmp_path):
    arguments = tiny_selector(tiny_model, tmp_path, "--federated=null", ACCURACY)
    arguments += [f"--trainer.callbacks.init_args.groups={run / 'groups.csv'}"]
    outcome = fedlight("test", *arguments, f"--model.adapter={run / 'adapter'}")
    assert outcome.code == 0, outcome.err
    rows = table(tmp_path / "clients.csv")
    last = {row["client"]: row["selector"] for row in table(run / "groups.csv")[6:]}
    assert {row["client"]: row["selector"] for row in rows} == last
    examples = [int(row["examples"]) for row in rows]
    assert all(count % 2 == 0 for count in examples)  # both orders of every vote
    pooled = sum(n * float(row["accuracy"]) for n, row in zip(examples, rows, strict=True)) / sum(examples)
    shown = {line.split()[1]: line.split()[3] for line in outcome.out.splitlines() if "test/" in line}
    assert float(shown["test/accuracy"]) == pytest.approx(pooled)  # which the module logs
    own = spread([float(row["own_accuracy"]) for row in rows], 0.1)
    assert {name: float(shown[f"test/own_{name}"]) for name in own} == pytest.approx(own)
