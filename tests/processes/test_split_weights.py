"""Full fine-tuning of clients in several processes, of which each trains and sends on its part of the weights."""

import lightning as L
import pytest
import split_runs
import torch
from plain_lightning import Block
from shared_runs import files_of
from split_runs import ALONE, assert_same_visits, close, in_processes, metrics_of
from torch import nn

from fedlight.callbacks.loop.parts.limits import Limits
from fedlight.federation.aggregation import CoordinateMedian, TrimmedMean
from fedlight.federation.algorithms.fedprox import FedProx
from fedlight.federation.algorithms.scaffold import Scaffold
from fedlight.federation.byzantine.whole_updates import Krum
from fedlight.federation.channel import Wire
from fedlight.federation.codecs import TopK
from fedlight.federation.server import FedAvgM, FedYogi

pytestmark = [
    pytest.mark.slow,  # teams of processes
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


class Tuned(L.LightningModule):
    """Layers, an embedding and a head, all trained; a batch may have fewer rows than processes."""

    optimizer = torch.optim.AdamW
    rate = 0.05

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(4, 8), nn.Linear(8, 1)
        self.layers = nn.ModuleList([Block() for _ in range(3)])

    def loss(self, batch):
        x = self.first(batch[0])
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(self.head(x), batch[1])

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val/error", self.loss(batch))

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), lr=self.rate)


class Momentum(Tuned):
    optimizer = staticmethod(lambda weights, lr: torch.optim.SGD(weights, lr=lr, momentum=0.9))


class PartlyFrozen(Tuned):
    """One layer frozen, one with a frozen bias, one trained."""

    def __init__(self):
        super().__init__()
        self.layers[0].requires_grad_(False)
        self.layers[1].inner.bias.requires_grad_(False)

    def configure_optimizers(self):
        return self.optimizer([p for p in self.parameters() if p.requires_grad], lr=self.rate)


class Tied(Tuned):
    """Two layers share a weight, and another one shares its own with what is outside of all layers."""

    def __init__(self):
        super().__init__()
        self.layers.append(Block())
        self.middle = nn.Linear(8, 8)
        self.layers[2].inner.weight = self.layers[0].inner.weight
        self.layers[3].inner.weight = self.middle.weight

    def loss(self, batch):
        x = self.middle(self.first(batch[0]))
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(self.head(x), batch[1])


class FrozenInBetween(Tuned):
    def on_train_epoch_start(self):
        self.layers[1].requires_grad_(self.current_epoch != 1)


class OddBlock(Block):
    client = None

    def forward(self, x):
        weight = self.inner.weight
        odd = 1e308 * (weight - weight.detach())[0, 0] if self.client == "c1" else 0.0
        return super().forward(x) + odd


class Explodes(Tuned):
    """A client's step makes one number infinite, which one process alone has."""

    optimizer = torch.optim.SGD
    rate = 100.0

    def __init__(self):
        super().__init__()
        self.layers[2] = OddBlock()

    def on_visit_start(self, client_id):
        self.layers[2].client = client_id


CLIPPED = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}
KINDS = {
    "fedavg": lambda: {"local_steps": None},
    "fedprox": lambda: {"algorithm": FedProx(mu=0.3)},
    "median": lambda: {"aggregation": CoordinateMedian()},
    "trimmed": lambda: {"aggregation": TrimmedMean(0.25)},
    "clipped": lambda: {"options": CLIPPED, "local_steps": 4, "model": Momentum},
    "limits": lambda: {"limits": Limits(norm=1.0, enforce=True)},
    "partly": lambda: {"model": PartlyFrozen},
    "fedyogi": lambda: {"server": FedYogi(lr=0.1)},
}
SHAPES = {ALONE: KINDS, (4, 2): KINDS, (3, 3): ("median", "partly")}
"""Kinds by processes, and processes for each client."""
SEVERAL = [(shape, name) for shape, names in SHAPES.items() if shape != ALONE for name in names]


def train(folder, shape, rounds=2, model=Tuned, **settings):
    """Train in this process; return the whole weights, the number of received weights here, and the metrics."""
    several = {"split_trained": shape[1] > 1}
    _, loop, trainer = split_runs.train(folder, shape, model, rounds, several=several, **settings)
    held = sum(value.numel() for value in loop._run.state.values())
    return trainer.strategy.lightning_module_state_dict(), held, metrics_of(trainer)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folder of all kinds of runs in all shapes, and what each process returns: shape -> rank -> kind."""
    root = tmp_path_factory.mktemp("runs")

    def all_kinds(shape):
        return {name: train(root / f"{name}_{shape}", shape, **KINDS[name]()) for name in SHAPES[shape]}

    return root, {shape: in_processes(shape, all_kinds, root) for shape in SHAPES}


@pytest.mark.parametrize(("shape", "name"), SEVERAL, ids=str)
def test_parts_end_as_whole_weights_do(runs, name, shape):
    root, results = runs
    [(alone, held, metrics)] = [ended[name] for ended in results[ALONE]]
    close(results[shape][0][name][0], alone)
    layer = "layers.2.inner.weight"
    for rank, ended in enumerate(results[shape]):
        state, part, theirs = ended[name]
        assert (state[layer].device.type == "meta") == (rank > 0)
        close(theirs, metrics)
        number = alone[layer].numel() + 8
        split = number if name == "partly" else 3 * number
        rows, total = -(-8 // shape[1]), held - split
        assert total + split * rows / 8 >= part >= total
    assert_same_visits(*(files_of(root / f"{name}_{each}")["visits.csv"] for each in (shape, ALONE)))


@pytest.mark.parametrize(
    ("first", "then", "name"),
    [(ALONE, (2, 2), "fedavg"), ((4, 2), ALONE, "fedyogi"), (ALONE, (3, 3), "fedyogi")],
    ids=str,
)
def test_a_run_goes_on_with_other_numbers(runs, tmp_path, first, then, name):
    in_processes(first, lambda shape: train(tmp_path, shape, rounds=1, **KINDS[name]()), tmp_path)
    ended = in_processes(then, lambda shape: train(tmp_path, shape, resumes=True, **KINDS[name]()), tmp_path)
    close(ended[0][0], runs[1][ALONE][0][name][0])


@pytest.mark.parametrize("model", [Tied, FrozenInBetween])
def test_layers_that_share_weights_or_are_frozen_later_train_as_in_one_process(tmp_path, model):
    alone, shared = (
        in_processes(shape, lambda shape: train(tmp_path / f"{shape}", shape, model=model), tmp_path)[0]
        for shape in (ALONE, (2, 2))
    )
    close(shared[0], alone[0])
    close(shared[2], alone[2])


def test_a_client_that_diverges_in_one_part_is_left_out_in_all(tmp_path):
    def work(shape):
        folder = tmp_path / f"{shape}"
        return train(folder, shape, rounds=1, model=Explodes, clients_per_round=10, local_steps=1)

    ended = []
    for shape in (ALONE, (2, 2)):
        ended += in_processes(shape, work, tmp_path)
        rows = files_of(tmp_path / f"{shape}")["visits.csv"]
        assert {row["client"] for row in rows if row["reason"] == "diverged"} == {"c1"}
    close(ended[1][0], ended[0][0])


class OwnServer(FedAvgM):
    pass


class OwnRule(torch.optim.SGD):
    pass


class Unlike(Tuned):
    optimizer = OwnRule


class SeesGradients(Tuned):
    def on_before_optimizer_step(self, optimizer):
        pass


class ClearsGradients(Tuned):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        self.zero_grad()


class ClipsGradients(L.Callback):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        nn.utils.clip_grad_norm_(pl_module.parameters(), 0.01)


class HooksGradients(Tuned):
    def __init__(self):
        super().__init__()
        self.layers[0].inner.weight.register_hook(torch.zeros_like)


class SeesUploads(L.Callback):
    shares_uploads = True

    def on_upload(self, upload):
        pass


class Unlisted(Tuned):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*self.layers)


@pytest.mark.parametrize(
    ("how", "complaint"),
    [
        (lambda: {"algorithm": Scaffold()}, "Scaffold sees whole weights"),
        (lambda: {"aggregation": Krum(0.2), "clients_per_round": 6}, "aggregation=Krum sees whole"),
        (lambda: {"server": OwnServer()}, "server=OwnServer sees whole weights"),
        (lambda: {"channel": Wire(up=TopK(0.5))}, "channel=Wire with codecs sees whole weights"),
        (lambda: {"callbacks": [SeesUploads()]}, "SeesUploads.on_upload sees whole weights"),
        (lambda: {"model": SeesGradients}, "SeesGradients.on_before_optimizer_step sees whole weights"),
        (lambda: {"model": ClearsGradients}, "ClearsGradients.optimizer_zero_grad sees whole weights"),
        (lambda: {"callbacks": [ClipsGradients()]}, "ClipsGradients.on_before_optimizer_step sees whole"),
        (lambda: {"model": HooksGradients}, "a hook on the gradient of inner.weight in Block would never"),
        (lambda: {"model": Unlike}, "OwnRule may look at whole weights"),
        (lambda: {"model": Unlisted}, r"Unlisted has no repeated layer \(nn.ModuleList\) whose weights are"),
    ],
)
def test_what_needs_whole_weights_is_refused_in_every_process(tmp_path, how, complaint):
    def tried(shape):
        with pytest.raises(ValueError, match=f"{complaint}.*split_trained=false"):
            train(tmp_path, shape, **how())

    in_processes((2, 2), tried, tmp_path)
