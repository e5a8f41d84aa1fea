import copy

import lightning as L
import numpy as np
import pytest
import torch
from plain_lightning import assert_equal, trainer, weights
from scipy.stats import trim_mean
from tastes import Adapters, Tastes, run
from tiny_world import VOTES, fedlight, refused, tiny_selector

from fedlight import Ditto, DPOModule, FedProx, Lora
from fedlight import __all__ as public
from fedlight.callbacks.loop.federated_loop import FederatedLoop
from fedlight.datamodules.preferences.datamodule import PreferenceDataModule
from fedlight.datamodules.rows.split import Split
from fedlight.federation.aggregation import CoordinateMedian, TrimmedMean
from fedlight.federation.algorithms import FedRep, GlobalThenLocal
from fedlight.federation.algorithms.fedbiscuit import FedBiscuit
from fedlight.federation.algorithms.lora import FlexLoRA, HetLoRA
from fedlight.federation.server import FedAdagrad, FedAdam, FedAvgM, FedYogi
from fedlight.modules.language.optimizers import Optimization
from fedlight.modules.reward import RewardModule
from fedlight.modules.selector import SelectorModule
from fedlight.modules.sft import SFTModule

LR, MU = 0.05, 0.5
PARTS = {
    "FedAvgM": {"server": FedAvgM(0.5, beta=0.9)},
    "FedAdagrad": {"server": FedAdagrad(0.1, tau=0.1)},
    "FedAdam": {"server": FedAdam(0.1, beta1=0.5, beta2=0.75, tau=0.1)},
    "FedYogi": {"server": FedYogi(0.1, tau=0.1)},
    "CoordinateMedian": {"aggregation": CoordinateMedian()},
    "TrimmedMean": {"aggregation": TrimmedMean(0.4)},
    "both": {"server": FedAdam(0.1, beta1=0.5, beta2=0.75, tau=0.1), "aggregation": CoordinateMedian()},
}


def parts(name):
    """Of one run: they remember."""
    return copy.deepcopy(PARTS.get(name, {}))


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("warmup", [1, 0])
def test_selectors_under_fedprox_with_mu_0_are_those_of_fedbiscuit(optimizer, warmup):
    plain, _ = run(FedBiscuit(warmup, 2), module=Adapters(3, optimizer))
    prox, _ = run(FedBiscuit(warmup, 2, local=FedProx(0)), module=Adapters(3, optimizer))
    near, _ = run(FedBiscuit(warmup, 2, local=FedProx(MU)), module=Adapters(3, optimizer))
    assert_equal(weights(prox), weights(plain))
    assert all(not torch.equal(value, weights(plain)[name]) for name, value in weights(near).items())


def recorded(algorithm, rounds, **loop):
    """The weights after each round, and of each its groups and the batches of its clients."""
    before, rows = weights(Adapters()), []

    class Recorder(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            federation = next(c for c in trainer.callbacks if isinstance(c, FederatedLoop))
            if batch_idx == 0:
                rows.append(({}, dict(federation.algorithm.groups)))
            rows[-1][0].setdefault(federation.visit.client_id, []).append(
                [b.cpu().double().numpy() for b in batch]
            )

        def on_train_epoch_end(self, trainer, pl_module):
            after.append(weights(pl_module))

    after = []
    run(algorithm, rounds, callbacks=[Recorder()], **loop)
    return before, after, rows


def trained(received, batches, mu):
    """What a client ends with: plain SGD on the mean squared error of a linear model, held near what it received."""
    w, b = received
    for x, y in batches:
        error = x @ w.T + b - y
        of_w = 2 / len(x) * error.T @ x + mu * (w - received[0])
        of_b = 2 * error.mean(0) + mu * (b - received[1])
        w, b = w - LR * of_w, b - LR * of_b
    return w, b


def normalized(moves, shares):
    return sum(share * move for share, move in zip(shares, moves, strict=True)) / sum(shares)


def written_out(before, rows, mu=0.0, combine=normalized, adaptive=False):
    """Rounds after the warm-up: ``combine`` makes one movement of each group's, which FedAdam treats if ``adaptive``."""
    data = Tastes()
    data.setup("fit")
    total = sum(map(len, data.client_indices.values()))
    selectors = [
        tuple(before[f"parts.adapter{u}.{part}"].double().numpy() for part in ("weight", "bias"))
        for u in range(3)
    ]
    m, v = [[0.0, 0.0] for _ in range(3)], [[0.01, 0.01] for _ in range(3)]  # tau ** 2
    history = []
    for visits, groups in rows:
        for u in {groups[client] for client in visits}:
            members = [client for client in visits if groups[client] == u]
            ends = [trained(selectors[u], visits[client], mu) for client in members]
            shares = [len(data.client_indices[client]) / total for client in members]
            new = []
            for i, old in enumerate(selectors[u]):
                d = combine([end[i] - old for end in ends], shares)
                if adaptive:
                    m[u][i] = 0.5 * m[u][i] + 0.5 * d
                    v[u][i] = 0.75 * v[u][i] + 0.25 * d**2
                    d = 0.1 * m[u][i] / (np.sqrt(v[u][i]) + 0.1)
                new.append(old + d)
            selectors[u] = tuple(new)
        history.append(
            {
                f"parts.adapter{u}.{p}": s
                for u, own in enumerate(selectors)
                for p, s in zip(("weight", "bias"), own, strict=True)
            }
        )
    return history


WRITTEN_OUT = {
    "FedProx": {"mu": MU},
    "FedAdam": {"adaptive": True},
    "CoordinateMedian": {"combine": lambda moves, shares: np.median(moves, axis=0)},
    "TrimmedMean": {"combine": lambda moves, shares: trim_mean(moves, 0.4, axis=0)},
    "both": {"combine": lambda moves, shares: np.median(moves, axis=0), "adaptive": True},
}


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_rounds_of_three_selectors_equal_those_written_out(name):
    """The groups are taken as they were found; of three members the trimmed mean leaves one, of two both."""
    local = FedProx(MU) if name == "FedProx" else None
    algorithm = FedBiscuit(0, 1, weighting="normalized", local=local)
    before, after, rows = recorded(algorithm, 4, clients_per_round=8, **parts(name))
    assert {len({groups[c] for c in visits}) for visits, groups in rows} == {3}
    for found, expected in zip(after, written_out(before, rows, **WRITTEN_OUT[name]), strict=True):
        for key, value in found.items():
            np.testing.assert_allclose(value, expected[key], rtol=1e-4, atol=2e-6)
    plain = written_out(before, rows)[-1]  # which is another one
    assert any(abs(value.numpy() - plain[key]).max() > 1e-3 for key, value in after[-1].items())


@pytest.mark.parametrize("name", PARTS)
def test_a_selector_without_sampled_members_does_not_move(name):
    settings = {"clients_per_round": 2, "module": Adapters(3, "AdamW"), **parts(name)}
    before, after, rows = recorded(FedBiscuit(0, 3), 8, **settings)
    numbers = []
    for (visits, groups), old, new in zip(rows, [before, *after], after, strict=False):
        moved = {groups[client] for client in visits}
        for key in new:
            mine = any(f"adapter{u}." in key for u in moved)
            assert torch.equal(new[key], old[key]) != mine, key
        numbers.append(len(moved))
    assert max(numbers) < 3


MODULES = {SelectorModule: "selector", SFTModule: "sft", DPOModule: "dpo", RewardModule: "dpo"}


@pytest.mark.filterwarnings("ignore:.*`val_dataloader`")
@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("algorithm", [Ditto, FedRep, GlobalThenLocal, HetLoRA, FlexLoRA])
def test_algorithms_train_every_module(algorithm, kind, tiny_model):
    def make():
        return kind(tiny_model, lora=Lora(rank=2), lr=0.05, optimizer=Optimization(name="SGD", args={}))

    fresh, module = make(), make()
    fresh.configure_model()
    sizes = {"max_tokens": 128, "batch_size": 4, "split": Split(val_share=0)}
    data = PreferenceDataModule(VOTES, view=MODULES[kind], tokenizer=tiny_model, **sizes)
    settings = {FedRep: {"private": ["lora_B"]}, GlobalThenLocal: {"global_rounds": 1}}.get(algorithm, {})
    loop = FederatedLoop(algorithm(**settings), clients_per_round=2, local_steps=2)
    trainer(2, [loop], limit_val_batches=0).fit(module, datamodule=data)
    before, after = weights(fresh), weights(module)
    frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
    assert all(torch.equal(after[name], before[name]) for name in frozen)
    moved = [name for name in after if not torch.equal(after[name], before[name])]
    visited = {client for client in loop.clients if loop.memory.load(client)}
    if algorithm is FedRep:  # A moves once B, which starts at 0 and stays with the clients, is another
        assert {*moved} == {name for name in after if "lora_B" not in name} - {*frozen}
        assert {*loop.own_state(visited.pop())} == {name for name in after if "lora_B" in name}
        return
    assert {name for name in moved if "lora_B" in name} == {name for name in after if "lora_B" in name}
    assert all(torch.isfinite(value).all() for value in after.values())
    assert bool(visited) == (algorithm in (Ditto, GlobalThenLocal))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["algorithm=FedAvgM"], "federated.algorithm: there is no class 'FedAvgM'"),
        (["algorithm=fedprox"], "federated.algorithm: there is no class 'fedprox'"),
        (["algorithm=fedlight.federation.algorithms.fedprox.FedProxy"], "federated.algorithm: "),
        (["algorithm=FedProx", "algorithm.mo=1"], "federated.algorithm: FedProx has no setting 'mo'"),
        (["algorithm=FedBiscuit", "algorithm.local=FedProxx"], "there is no class 'FedProxx'"),
        (["server=FedAdm"], "federated.server: there is no class 'FedAdm'"),
        (["server=FedAdam", "server.beta=0.9"], "federated.server: FedAdam has no setting 'beta'"),
        (["servr=FedAdam"], "has no setting 'servr'"),
        (["aggregation=FedAvg"], "federated.aggregation: "),
        (["parts=[Memories]"], "there is no class 'Memories'"),
        (["algorithm=FedBiscuit", "algorithm.local=Scaffold"], "local=Scaffold changes finish_visit"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_misspelt_parts_are_refused_and_never_plain_averaging(arguments, message, tmp_path):
    """Before any model is loaded: there is none."""
    settings = [f"--federated.{argument}" for argument in arguments]
    outcome = fedlight("fit", *tiny_selector("none", tmp_path / "run", *settings))
    assert outcome.code == 2
    line = refused(outcome)
    assert message in line
    assert "Union" not in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", [name for name in PARTS if name != "both"])
def test_short_names_on_the_command_line(name, tiny_model, tmp_path):
    (key,) = PARTS[name]
    few = ["--trainer.max_epochs=1", "--trainer.limit_val_batches=0", f"--federated.{key}={name}"]
    outcome = fedlight("fit", *tiny_selector(tiny_model, tmp_path, *few, "--print_config"))
    room = "" if name in public else "federation."
    assert f"class_path: fedlight.{room}{name}\n" in outcome.out
