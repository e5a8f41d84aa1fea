"""Clients that several processes train together: a part of the layers and of each batch in each, with one process's results."""

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from memories import loop_with
from peft import LoraConfig, get_peft_model
from plain_lightning import Numbers, ten_clients
from plain_lightning import trainer as quiet_trainer
from ranks import log_of, run_ranks, start_ranks, wait_for
from shared_runs import files_of, newest
from torch import nn
from torchmetrics import MeanSquaredError

from fedlight.callbacks.logs.visit_log import VisitLog
from fedlight.datamodules.federated.by_client import FederatedWrapper
from fedlight.federation.aggregation import TrimmedMean
from fedlight.federation.algorithms.ditto import Ditto
from fedlight.federation.algorithms.scaffold import Scaffold
from fedlight.federation.byzantine.whole_updates import Krum
from fedlight.federation.channel import Wire
from fedlight.federation.client_state import ClientMemories
from fedlight.federation.codecs import TopK
from fedlight.processes.strategy import ClientParallelStrategy

SHAPES = ((2, 2), (4, 2), (3, 3))
"""Processes, and processes for each client."""
KINDS = {
    "fedavg": lambda: {"local_steps": None},
    "scaffold": lambda: {"algorithm": Scaffold()},
    "ditto": lambda: {"algorithm": Ditto(lam=0.5), "local_steps": None},
    "trimmed": lambda: {"aggregation": TrimmedMean(0.25)},
    "krum": lambda: {"aggregation": Krum(0.2), "clients_per_round": 6},
    "wire": lambda: {"channel": Wire(up=TopK(0.5))},
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.inner(x))


class Layered(L.LightningModule):
    """Frozen layers with LoRA, and a trained head; a batch may have fewer rows than processes."""

    def __init__(self):
        super().__init__()
        net = nn.Module()
        net.first, net.layers = nn.Linear(4, 8), nn.ModuleList([Block() for _ in range(3)])
        net.forward = lambda x: x
        self.net = get_peft_model(net, LoraConfig(r=2, target_modules=["inner"], init_lora_weights=False))
        self.head = nn.Linear(8, 1)
        self.error = MeanSquaredError()

    def features(self, x):
        net = self.net.base_model.model
        x = net.first(x)
        for layer in net.layers:
            x = layer(x)
        return x

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.head(self.features(batch[0])), batch[1])

    def validation_step(self, batch, batch_idx):
        self.error(self.head(self.features(batch[0])), batch[1])
        self.log("val/error", self.error, on_epoch=True)

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.05)


def strategy(processes, per_client):
    if processes == 1:
        return {}
    return {"strategy": ClientParallelStrategy(processes_per_client=per_client), "devices": processes}


def train(folder, processes, per_client, rounds=3, resumes=False, model=Layered, **settings):
    """Train in this process, one of ``processes``; return the weights, the memories and the layers held here."""
    L.seed_everything(0, verbose=False)
    module = model()
    loop = loop_with(**({"clients_per_round": 4, "local_steps": 2} | settings))
    saved = ModelCheckpoint(folder / "checkpoints", filename="{epoch}", save_top_k=-1)
    trainer = L.Trainer(
        max_epochs=rounds,
        accelerator="cpu",
        precision="64-true",
        default_root_dir=folder,
        callbacks=[loop, VisitLog(), saved],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **strategy(processes, per_client),
    )
    path = newest(folder) if resumes else None
    trainer.fit(module, FederatedWrapper(Numbers(), ten_clients), ckpt_path=path, weights_only=bool(path) or None)
    state = {name: value.numpy() for name, value in trainer.strategy.lightning_module_state_dict().items()}
    memories = {client: loop.memory.load(client) for client in loop.clients}
    held = sum(getattr(p, "_local_tensor", p).numel() for p in module.net.parameters() if not p.requires_grad)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return state, memories, held, metrics


def close(some, others):
    assert some.keys() == others.keys()
    for name in some:
        if isinstance(some[name], dict):
            close(some[name], others[name])
        else:
            np.testing.assert_allclose(some[name], others[name], rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")

    def all_kinds(size, per_client):
        return lambda rank: {
            name: train(root / f"{name}_{size}_{per_client}", size, per_client, **make()) for name, make in KINDS.items()
        }

    shapes = ((1, 1), *SHAPES)
    return root, {shape: run_ranks(shape[0], all_kinds(*shape), root / f"logs{shape}", 240) for shape in shapes}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_every_process_ends_with_what_one_process_ends_with(runs, name, shape):
    root, results = runs
    alone, memories, held, metrics = results[1, 1][0][name]
    theirs = files_of(root / f"{name}_1_1")["visits.csv"]
    for rank in range(shape[0]):
        state, kept, part, values = results[shape][rank][name]
        close(state, alone)
        close(kept, memories)
        close(values, metrics)
        assert part < held * (0.85 if shape[1] == 2 else 0.7)  # the layers alone are split
        first = results[shape][0][name][0]
        assert all((state[weight] == first[weight]).all() for weight in state)
    ours = files_of(root / f"{name}_{shape[0]}_{shape[1]}")["visits.csv"]
    losses, expected = ([float(row.pop("loss")) for row in rows] for rows in (ours, theirs))
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    assert ours == theirs
