import numpy as np
import pytest
import torch
from judges import MARGINS, Judge, Margins, trainer
from plain_lightning import weights
from tastes import SIGNS, Spread, Tastes, run, stepped
from tiny_world import table
from two_parts import Recorder

from fedlight import ClipAndNoise, CoordinateMedian, FedBiscuit, Wire
from fedlight.callbacks.logs import ClientAccuracy
from fedlight.callbacks.logs.group_log import GroupLog, read_selectors
from fedlight.federation.algorithms import NearestGroups, SoftGroups
from fedlight.federation.client import serialized_bytes


def em(pi, losses):
    """A step written out example by example."""
    q = []
    for own in losses:
        shares = [p * np.exp(-loss) for p, loss in zip(pi, own, strict=True)]
        q.append([share / sum(shares) for share in shares])
    return np.mean(q, axis=0)


def written_out(start, visits, warmup, tau, weighting, group_by):
    """Selectors and weights after the recorded rounds."""
    data = Tastes()
    data.setup("fit")
    x, y = data.train_set.tensors
    sizes = {client: len(rows) for client, rows in data.client_indices.items()}
    p = {client: size / sum(sizes.values()) for client, size in sizes.items()}
    selectors, count = start, len(start)
    pi = {client: np.full(count, 1 / count) for client in SIGNS}
    for r, of_round in visits.items():
        is_warm = r >= warmup * count
        if is_warm and (r - warmup * count) % tau == 0:
            for client in SIGNS:
                rows = data.val_client_indices[client]
                if group_by == "own":
                    rows = np.r_[data.client_indices[client], rows]
                losses = [
                    ((x[rows] @ w["weight"].T + w["bias"] - y[rows]) ** 2)[:, 0].numpy() for w in selectors
                ]
                pi[client] = em(pi[client], np.stack(losses, axis=1))
        moves = [[] for _ in selectors]
        for visit, batches in of_round:
            u = int(visit.part.removeprefix("adapter")) if is_warm else r // warmup
            end, client = stepped(selectors[u], batches), visit.client_id
            share = {"uniform": 1.0}.get(weighting, p[client]) * (pi[client][u] if is_warm else 1.0)
            moves[u].append((share, {name: end[name] - selectors[u][name] for name in end}))
        new = []
        for u, (w, own) in enumerate(zip(selectors, moves, strict=True)):
            factor = 1.0
            if own and weighting in ("normalized", "uniform"):
                factor = 1 / sum(share for share, _ in own)
            elif own and not is_warm:
                factor = len(SIGNS) / len(own)
            elif own and weighting == "unbiased":
                factor = len(SIGNS) / len(own) / sum(p[client] * pi[client][u] for client in SIGNS)
            new.append({name: w[name] + factor * sum(share * m[name] for share, m in own) for name in w})
        selectors = new
    return {f"parts.adapter{u}.{name}": v for u, w in enumerate(selectors) for name, v in w.items()}, pi


@pytest.mark.parametrize(
    ("weighting", "warmup", "count", "group_by"),
    [
        ("normalized", 0, 3, "val"),
        ("normalized", 1, 2, "own"),
        ("paper", 1, 3, "val"),
        ("unbiased", 0, 2, "own"),
        ("uniform", 1, 2, "val"),
    ],
)
def test_rounds_equal_the_algorithm_written_out(weighting, warmup, count, group_by):
    seen, module = Recorder(), Spread(count)
    start = module.start()
    algorithm = FedBiscuit(warmup, 2, SoftGroups(), weighting, group_by=group_by)
    _, loop = run(algorithm, 5 + warmup * count, module, [seen])
    parts = [[visit.part for visit, _ in of_round] for of_round in seen.visits.values()]
    every = [f"adapter{u}" for u in range(count)]
    assert parts == [[""] * 4] * warmup * count + [every * 4] * 5
    expected, pi = written_out(start, seen.visits, warmup, 2, weighting, group_by)
    for name, value in weights(module).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5, msg=name)
    found = loop.algorithm
    for client, own in pi.items():
        assert found.weights[client] == pytest.approx(own.tolist(), rel=1e-4)
        assert found.groups[client] == int(np.argmax(own))
    assert max(max(own) for own in found.weights.values()) > 0.9


def test_each_visit_sends_one_selector():
    module, loop = run(FedBiscuit(0, 2, SoftGroups()), rounds=1, module=Spread())
    one = serialized_bytes({n: p.detach() for n, p in module.named_parameters() if "adapter0" in n})
    assert [(row["split"], row["bytes_down"], row["bytes_up"]) for row in loop.visit_records] == [
        (f"adapter{u}", one, one) for u in range(3)
    ] * 4


EQUAL = "all 3 selectors are equal, so assignment={} cannot tell"


@pytest.mark.parametrize(
    ("assignment", "message", "settings"),
    [
        (NearestGroups, EQUAL.format("NearestGroups"), {}),
        (SoftGroups, EQUAL.format("SoftGroups"), {}),
        (SoftGroups, "SoftGroups weights the clients' movements", {"aggregation": CoordinateMedian()}),
        (SoftGroups, "is accounted for one in a round", {"channel": Wire(up=[ClipAndNoise(1.0, 1.0)])}),
    ],
)
def test_what_does_not_go_with_selectors_for_all_is_refused_before_training(assignment, message, settings):
    with pytest.raises(ValueError, match=message):
        run(FedBiscuit(0, 2, assignment()), module=Spread() if settings else None, **settings)


class Odds(Judge):
    """Log-odds of the right answer by each selector: the margins, around 0."""

    def __init__(self, gives=True):
        super().__init__()
        self.gives = gives

    def _evaluate(self, stage, batch):
        found = super()._evaluate(stage, batch)
        return found | ({"log_odds": 6 * (batch - 0.5)} if self.gives else {})


PI = {"a": [0.2, 0.5, 0.3], "b": [0.0, 0.6, 0.4], "c": [0.4, 0.2, 0.4], "d": [0.1, 0.1, 0.8]}


@pytest.fixture
def groups(tmp_path):
    lines = [f"0,{client},0,{','.join(map(str, pi))}" for client, pi in PI.items()]
    path = tmp_path / "groups.csv"
    path.write_text("\n".join(["round,client,selector,weight_0,weight_1,weight_2", *lines]) + "\n")
    return str(path)


def own_accuracies(folder):
    return {row["client"]: row["own_accuracy"] for row in table(folder / "clients.csv")}


def test_a_client_s_prediction_mixes_the_probabilities_of_its_selectors(tmp_path, groups):
    run = trainer(tmp_path, ClientAccuracy(groups=groups))
    run.test(Odds(), datamodule=Margins(), verbose=False)
    expected = {}
    for client, margins in MARGINS.items():
        probabilities = [
            sum(p / (1 + np.exp(-6 * (m - 0.5))) for p, m in zip(PI[client], own, strict=True))
            for own in margins
        ]
        expected[client] = np.mean([probability > 0.5 for probability in probabilities])
    assert {name: float(own) for name, own in own_accuracies(tmp_path).items()} == pytest.approx(expected)
    assert len({*expected.values()}) > 2
    assert float(run.callback_metrics["test/own_client_mean"]) == pytest.approx(np.mean([*expected.values()]))


def test_without_log_odds_there_is_no_own_accuracy(tmp_path, groups, caplog):
    run = trainer(tmp_path, ClientAccuracy(groups=groups))
    with caplog.at_level("INFO"):
        run.test(Odds(gives=False), datamodule=Margins(), verbose=False)
    assert "are here to mix those of a client, so there is no own accuracy" in caplog.text
    assert {*own_accuracies(tmp_path).values()} == {""}
    assert "test/own_client_mean" not in run.callback_metrics


def test_the_weights_of_a_run_are_written_and_read_back(tmp_path):
    log = GroupLog(str(tmp_path / "groups.csv"))
    _, loop = run(FedBiscuit(0, 2, SoftGroups()), rounds=3, module=Spread(), callbacks=[log])
    groups, pi = read_selectors(tmp_path / "groups.csv")
    assert groups == loop.algorithm.groups
    assert pi == loop.algorithm.weights
