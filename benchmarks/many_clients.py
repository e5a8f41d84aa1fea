"""What ten thousand clients cost: SCAFFOLD with a control variate of each, FedBiscuit with a grouping of all of them.

Four clients take part in a round. SCAFFOLD: every client has been there before, so that its variate of 64 KiB exists (these
are written beforehand, in random numbers); above a limit of 16 MiB they lie on disk. FedBiscuit: three adapters of 64 KiB,
and all clients are grouped in every round; the validation examples, 20,000, are the same number for any number of clients.
Each run is a separate process that saves a checkpoint after every round, as `fedlight fit` does. Reported are the peak
memory of the process (VmHWM), what lies on disk at the end, and the median round.

Run: python benchmarks/many_clients.py [--rounds 6] [--clients 10 1000 10000] [--json FILE]
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from shown_rows import show
from torch import nn
from torch.utils.data import TensorDataset, default_collate

from fedlight.callbacks.logs.group_log import GroupLog
from fedlight.callbacks.logs.visit_log import VisitLog
from fedlight.callbacks.loop.federated_loop import FederatedLoop
from fedlight.datamodules.federated.datamodule import FederatedDataModule
from fedlight.federation.algorithm import Algorithm
from fedlight.federation.algorithms.fedbiscuit import FedBiscuit
from fedlight.federation.algorithms.scaffold import OWN, Scaffold
from fedlight.federation.client import Client
from fedlight.federation.client_state import ClientMemories
from fedlight.federation.protocols import Federation

WIDTH, RANK, LAYERS = 256, 16, 2
EXAMPLES, COHORT, STEPS, BATCH = 20_000, 4, 5, 16
LIMIT_MIB = 16


class Adapters(L.LightningModule):
    """Frozen linear layers with low-rank adapters, one set of them active."""

    def __init__(self, count: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.adapter_names = [f"adapter{i}" for i in range(count)]
        self.base = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).requires_grad_(False)
        down = [torch.randn(WIDTH, RANK, generator=generator) / WIDTH**0.5 for _ in range(LAYERS)]
        self.adapters = nn.ModuleDict(
            {
                name: nn.ParameterList([p.clone() for a in down for p in (a, torch.zeros(RANK, WIDTH))])
                for name in self.adapter_names
            }
        )
        self.active = self.adapter_names[0]

    def use_adapter(self, name: str) -> None:
        """Makes one the active one."""
        self.active = name

    def example_losses(self, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        """Squared errors of the mean output, ``(batch,)``."""
        x, own = batch[0], self.adapters[self.active]
        for i, layer in enumerate(self.base):
            x = torch.relu(layer(x) + x @ own[2 * i] @ own[2 * i + 1])
        return (x.mean(dim=1) - batch[1]).square()

    def training_step(self, batch: Sequence[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Their mean."""
        return self.example_losses(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD, under which SCAFFOLD is exact."""
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class Data(FederatedDataModule):
    """Random numbers, as many for any number of clients; half of them to validate on."""

    def __init__(self, clients: int) -> None:
        super().__init__(batch_size=BATCH, eval_batch_size=256)
        self.num_clients = clients

    def setup(self, stage: str) -> None:
        """Shares the examples out evenly."""
        generator = torch.Generator().manual_seed(0)
        self.train_set, self.val_set = (
            TensorDataset(
                torch.randn(EXAMPLES, WIDTH, generator=generator), torch.rand(EXAMPLES, generator=generator)
            )
            for _ in range(2)
        )
        shares = np.array_split(np.arange(EXAMPLES), self.num_clients)
        self.client_indices = self.val_client_indices = {f"c{i:05d}": own for i, own in enumerate(shares)}

    def collate(self, examples: list[Any]) -> Any:
        """Tensors of a batch."""
        return default_collate(examples)


class Grouping(FedBiscuit):
    """Notes how long a grouping takes: three passes over the validation examples of all clients, and the assignment."""

    def __init__(self) -> None:
        super().__init__(warmup_rounds=0, regroup_every=1, weighting="normalized")
        self.seconds: list[float] = []

    def start_round(self, round_idx: int, cohort: Sequence[Client], federation: Federation) -> None:
        """Groups all clients."""
        start = time.perf_counter()
        super().start_round(round_idx, cohort, federation)
        self.seconds.append(time.perf_counter() - start)


class RoundClock(L.Callback):
    """Seconds from the start of one round to the start of the next: checkpoint, tables and planning are in them."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """A round starts."""
        self.starts.append(time.perf_counter())

    def median(self) -> float:
        """Of all rounds but the first, which warms up, and the last, whose end is not the start of another."""
        return statistics.median(b - a for a, b in zip(self.starts[1:], self.starts[2:], strict=False))


def remembered(module: Adapters, clients: Sequence[str], folder: Path) -> ClientMemories:
    """A control variate of every client."""
    memories, generator = ClientMemories(str(folder), LIMIT_MIB), torch.Generator().manual_seed(0)
    shapes = {name: p.shape for name, p in module.named_parameters() if p.requires_grad}
    for client in clients:
        control = {name: 1e-3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        memories.save(client, {OWN: control}, round_idx=0)
    return memories


def measure(method: str, clients: int, rounds: int, folder: Path) -> dict[str, float]:
    """Runs ``rounds`` rounds and gives their costs.

    Args:
        method: ``scaffold`` or ``fedbiscuit``.
        clients: how many there are, between 4 and 20,000.
        rounds: at least 3.
        folder: where the run keeps its files.
    """
    module, data = Adapters(1 if method == "scaffold" else 3), Data(clients)
    data.setup("fit")
    algorithm: Algorithm = Scaffold() if method == "scaffold" else Grouping()
    memory = remembered(module, [*data.client_indices], folder / "clients") if method == "scaffold" else None
    clock = RoundClock()
    loop = FederatedLoop(algorithm, clients_per_round=COHORT, local_steps=STEPS)
    loop.memory = memory or loop.memory
    trainer = L.Trainer(
        max_epochs=rounds,
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        callbacks=[
            clock,
            loop,
            VisitLog(),
            *([GroupLog()] if method == "fedbiscuit" else []),
            ModelCheckpoint(folder / "checkpoints", save_on_train_epoch_end=True),
        ],
    )
    trainer.fit(module, datamodule=data)
    found = {"peak_mib": peak_mib(), "round": clock.median(), **on_disk(folder)}
    return found | (
        {"grouping": statistics.median(algorithm.seconds)} if isinstance(algorithm, Grouping) else {}
    )


def peak_mib() -> float:
    """Most memory that this process has had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def on_disk(folder: Path) -> dict[str, float]:
    """MiB of the clients' memories, of the checkpoint and of the tables."""

    def mib(pattern: str) -> float:
        return sum(file.stat().st_size for file in folder.glob(pattern)) / 2**20

    return {
        "memories_mib": mib("clients/*"),
        "checkpoint_mib": mib("checkpoints/*"),
        "tables_mib": mib("*.csv"),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 1_000, 10_000])
    parser.add_argument(
        "--only", choices=["scaffold", "fedbiscuit"], help="one run, in this process, as JSON"
    )
    parser.add_argument("--json", type=Path, help="where the rows go as well")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    if options.only:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(options.only, options.clients[0], options.rounds, Path(folder))))
        return
    rows = []
    for method, clients in product(("scaffold", "fedbiscuit"), options.clients):
        numbers = [f"--clients={clients}", f"--rounds={options.rounds}"]
        command = [sys.executable, __file__, f"--only={method}", *numbers]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        rows.append({"method": method, "clients": clients, **json.loads(output.splitlines()[-1])})
    show(rows, options.json)


if __name__ == "__main__":
    main()
