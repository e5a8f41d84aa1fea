import lightning as L
import numpy as np
import pytest
import torch
from plain_lightning import Metrics, Numbers, assert_equal, ten_clients, trainer, weights
from tastes import SIGNS, Adapters, Spread, Tastes, run, stepped
from torch import nn
from two_parts import Recorder

from fedlight import Algorithm, FedAvg, FederatedLoop, FederatedWrapper
from fedlight.federation.algorithms import NearestGroups, OptimalGroups
from fedlight.federation.algorithms.fedbiscuit import FedBiscuit, greedy
from fedlight.federation.client import Client, Visit, serialized_bytes


def by_hand(warmup, tau, rounds, factors, seen):
    """Algorithm 1 on the recorded cohorts and batches; ``factors(sampled members, group)`` weighs movements."""
    data, module = Tastes(), Adapters()
    data.setup("fit")
    total = sum(map(len, data.client_indices.values()))
    share = {c: len(rows) / total for c, rows in data.client_indices.items()}
    state = [{k: v.clone() for k, v in p.state_dict().items()} for p in module.parts.values()]
    everyone, groups = sorted(SIGNS), {}
    for r in range(rounds):
        if r >= 3 * warmup and (r - 3 * warmup) % tau == 0:
            losses = expected_losses(state, ROWS_BY["val"])
            groups = greedy(np.array([losses[client] for client in everyone])).tolist()
            groups = dict(zip(everyone, groups, strict=True))
        moves = {}
        for visit, batches in seen[r]:
            u = r // warmup if r < 3 * warmup else groups[visit.client_id]
            move = {k: v - state[u][k] for k, v in stepped(state[u], batches).items()}
            moves.setdefault(u, []).append((visit.client_id, move))
        for u, of_group in moves.items():
            group = everyone if r < 3 * warmup else [c for c in everyone if groups[c] == u]
            weight = factors([c for c, _ in of_group], group, share, r < 3 * warmup)
            for client, move in of_group:
                for k, v in move.items():
                    state[u][k] = state[u][k] + weight[client] * v
    return {f"parts.adapter{u}.{k}": v for u, s in enumerate(state) for k, v in s.items()}


def eq_8(sampled, group, share, warming):
    return {c: len(group) / len(sampled) * share[c] for c in sampled}


FACTORS = {
    "paper": lambda s, g, p, warming: eq_8(s, g, p, warming) if warming else {c: p[c] for c in s},
    "unbiased": lambda s, g, p, warming: {
        c: len(g) / len(s) * p[c] / (1 if warming else sum(p[m] for m in g)) for c in s
    },
    "normalized": lambda s, g, p, warming: {c: p[c] / sum(p[m] for m in s) for c in s},
    "uniform": lambda s, g, p, warming: {c: 1 / len(s) for c in s},
}


@pytest.mark.parametrize("weighting", FACTORS)
def test_rounds_equal_algorithm_1_written_out(weighting):
    seen = Recorder()
    module, _ = run(FedBiscuit(2, 3, weighting=weighting), rounds=12, callbacks=[seen])
    expected = by_hand(2, 3, 12, FACTORS[weighting], seen.visits)
    for name, value in weights(module).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("weighting", ["unbiased", "normalized", "uniform"])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_one_selector_is_fedbis_bit_for_bit(weighting, optimizer):
    ours, loop = run(FedBiscuit(1, 2, weighting=weighting), module=Adapters(1, optimizer))
    plain, _ = run(FedAvg(weighting), module=Adapters(1, optimizer))
    assert_equal(weights(ours), weights(plain))
    assert set(loop.algorithm.groups.values()) == {0}


def test_bytes_of_visits_and_of_the_grouping_are_exact():
    metrics = Metrics("bytes")
    module, _ = run(FedBiscuit(1, 2), rounds=6, callbacks=[metrics])
    everything = {name: p.detach() for name, p in module.named_parameters()}
    one = {name: p for name, p in everything.items() if "adapter1" in name}
    for round_idx, row in enumerate(metrics.rounds):
        assert row["fed/bytes_down"] == row["fed/bytes_up"] == 4 * serialized_bytes(one)
        grouping = round_idx in (3, 5)
        assert row["fed/grouping_bytes_down"] == grouping * 9 * serialized_bytes(everything)
        assert row["fed/grouping_bytes_up"] == grouping * 9 * serialized_bytes({"losses": torch.zeros(3)})


def test_grouping_leaves_the_weights_and_the_mode_alone():
    class Watch(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            assert pl_module.training

    algorithm = FedBiscuit(0, 1, assignment=OptimalGroups())
    module, loop = run(algorithm, rounds=1, callbacks=[Watch()], clients_per_round=1)
    assert loop.algorithm.grouped_round == 0
    start = weights(Adapters())
    trained = loop.algorithm.groups[loop.visit_records[0]["client"]]
    for name, value in weights(module).items():
        assert torch.equal(value, start[name]) == (f"adapter{trained}" not in name)


def expected_losses(start, rows_of):
    """The mean loss of each client under each selector, on the rows that ``rows_of(data, client)`` names."""
    data = Tastes()
    data.setup("fit")
    x, y = data.train_set.tensors
    return {
        client: [float((x[i] @ w["weight"].T + w["bias"] - y[i]).square().mean()) for w in start]
        for client, i in ((client, rows_of(data, client)) for client in SIGNS)
    }


ROWS_BY = {
    "val": lambda data, client: data.val_client_indices[client],
    "own": lambda data, client: np.r_[data.client_indices[client], data.val_client_indices[client]],
}


@pytest.mark.parametrize("group_by", ROWS_BY)
@pytest.mark.parametrize("count", [2, 3])
def test_nearest_groups_by_the_least_loss_on_the_examples_asked_for(group_by, count):
    module = Spread(count)
    expected = expected_losses(module.start(), ROWS_BY[group_by])
    other = expected_losses(module.start(), ROWS_BY["val" if group_by == "own" else "own"])
    algorithm, metrics = FedBiscuit(0, 5, assignment=NearestGroups(), group_by=group_by), Metrics()
    _, loop = run(algorithm, rounds=1, module=module, callbacks=[metrics])
    found = loop.algorithm
    assert metrics.rounds[0]["fed/selectors_used"] == count
    for client, losses in found.losses.items():
        assert losses == pytest.approx(expected[client], rel=1e-5)
        assert losses != pytest.approx(other[client], rel=1e-3)
    assert found.groups == {client: int(np.argmin(own)) for client, own in expected.items()}
    sizes = np.bincount([*found.groups.values()], minlength=count)
    assert sizes.tolist() == ([3, 3, 3] if count == 3 else [6, 3])  # of two, the taste -1 goes with 1


def test_own_examples_need_no_validation_split():
    module = Spread()
    expected = expected_losses(module.start(), lambda data, client: data.client_indices[client])
    loop = FederatedLoop(FedBiscuit(0, 1, group_by="own"), clients_per_round=2, local_steps=1)
    trainer(1, [loop], limit_val_batches=0).fit(module, datamodule=NoValidation(batch_size=4))
    for client, losses in loop.algorithm.losses.items():
        assert losses == pytest.approx(expected[client], rel=1e-5)


class KeepsState(Algorithm):
    def reply(self, visiting, trained, work):
        return trained


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedBiscuit(-1), "warmup_rounds=-1 must be at least 0"),
        (lambda: FedBiscuit(regroup_every=0), "regroup_every=0"),
        (lambda: FedBiscuit(assignment="best"), "assignment='best' must be an Assignment or None: give an"),
        (lambda: FedBiscuit(group_by="test"), "group_by='test' is not one of val, own"),
        (lambda: FedBiscuit(weighting="mean"), "weighting='mean' is not one of"),
        (lambda: FedBiscuit(local=KeepsState()), "local=KeepsState changes reply"),
    ],
)
def test_settings_that_cannot_work_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


class NoValidation(Tastes):
    def setup(self, stage):
        super().setup(stage)
        self.val_set = self.val_client_indices = None


def test_modules_and_data_that_do_not_fit_are_refused():
    class Shared(Adapters):
        def __init__(self):
            super().__init__()
            self.common = nn.Linear(4, 4)

    with pytest.raises(ValueError, match=r"common.weight is trained and belongs to no single adapter"):
        run(FedBiscuit(1, 1), module=Shared())
    with pytest.raises(ValueError, match="has 3 adapters, of which FedAvg would train one"):
        run(FedAvg())
    with pytest.raises(ValueError, match="warm-up of 3 selectors takes 6 rounds and the run has 6"):
        run(FedBiscuit(2, 1))
    loop = FederatedLoop(FedBiscuit(1, 1), clients_per_round=2)
    with pytest.raises(ValueError, match="no validation examples by client"):
        trainer(4, [loop], limit_val_batches=0).fit(Adapters(), datamodule=NoValidation())
    loop = FederatedLoop(FedBiscuit(0, 1, group_by="own"), clients_per_round=2)
    with pytest.raises(ValueError, match=r"cannot give the clients' training examples .*group_by=val"):
        trainer(1, [loop]).fit(Adapters(), FederatedWrapper(Numbers(), ten_clients))


def test_a_parameter_that_joins_after_the_start_is_refused_by_name():
    algorithm = FedBiscuit(warmup_rounds=1)
    algorithm._selector_of, algorithm._warming = {"parts.adapter0.weight": 0}, 0
    state = {"parts.adapter0.weight": torch.zeros(1), "backbone.weight": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"backbone.weight joined the optimizer after the start"):
        algorithm.send(Visit("a", 1), Client("a", 1, 1.0), state)


def test_after_a_round_the_first_selector_is_active_whoever_was_visited_last():
    seen = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer, module, *_):
            seen.append(module.active)

        def on_train_epoch_end(self, trainer, module):
            seen.append(f"after {module.active}")

    run(FedBiscuit(1, 1), rounds=5, callbacks=[Watch()])
    assert {*seen} == {"adapter0", "adapter1", "adapter2", "after adapter0"}
