"""Cost of the federated loop: a round through Lightning against the same steps in a hand-written torch loop.

Both train the same model on the same batches, alternating within one run, so that a noisy machine disturbs both alike;
reported is the median of the ratios of neighbouring rounds. A second part measures peak memory against the number of
clients at a fixed cohort.

Run: python benchmarks/loop_overhead.py [--rounds 6] [--widths 128 1024 2048 2880] [--json FILE]
"""

import argparse
import logging
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from shown_rows import show
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedlight.callbacks.loop.federated_loop import FederatedLoop
from fedlight.datamodules.federated.by_client import FederatedWrapper

WIDTHS = [128, 1024, 2048, 2880]
COHORT, STEPS, BATCH = 4, 10, 32


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter, which clients train."""

    def __init__(self, width: int, rank: int = 8) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(width, rank) / width**0.5)
        self.b = nn.Parameter(torch.zeros(rank, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(batch, width)`` to ``(batch, width)``."""
        return torch.relu(self.base(x) + x @ self.a @ self.b)


class Net(L.LightningModule):
    """Four adapted layers, whose width sets how long a step takes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Adapted(width) for _ in range(4)), nn.Linear(width, 1))

    def trained(self) -> list[nn.Parameter]:
        """The optimizer's parameters."""
        return [p for p in self.parameters() if p.requires_grad]

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Mean squared error."""
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, like a client's."""
        return torch.optim.AdamW(self.trained(), lr=1e-3)


class Data(L.LightningDataModule):
    """Random numbers."""

    def __init__(self, width: int, examples: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.set = TensorDataset(torch.randn(examples, width, generator=generator), torch.randn(examples, 1))

    def train_dataloader(self) -> DataLoader:
        """Batches of 32."""
        return DataLoader(self.set, batch_size=BATCH)


class RoundClock(L.Callback):
    """Seconds of each round, from its start to its server step; waits for the hand-written round in between."""

    def __init__(self, by_hand: Callable[[], None]) -> None:
        self.by_hand = by_hand
        self.lightning_seconds: list[float] = []
        self.hand_seconds: list[float] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The hand-written round goes first, then the clock for Lightning starts."""
        start = time.perf_counter()
        self.by_hand()
        self.hand_seconds.append(time.perf_counter() - start)
        self.start = time.perf_counter()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The round is over."""
        self.lightning_seconds.append(time.perf_counter() - self.start)


def round_by_hand(model: Net, dataset: TensorDataset, clients: list[np.ndarray]) -> None:
    """FedAvg as one would write it: copy, train, subtract, add."""
    start = [p.detach().clone() for p in model.trained()]
    total = [torch.zeros_like(p) for p in start]
    for indices in clients:
        with torch.no_grad():
            for p, value in zip(model.trained(), start, strict=True):
                p.copy_(value)
        optimizer = torch.optim.AdamW(model.trained(), lr=1e-3)
        for step in range(STEPS):
            rows = indices[(np.arange(BATCH) + step * BATCH) % len(indices)]
            x, y = torch.utils.data.default_collate([dataset[i] for i in rows])
            optimizer.zero_grad()
            nn.functional.mse_loss(model.net(x), y).backward()
            optimizer.step()
        for movement, p, value in zip(total, model.trained(), start, strict=True):
            movement += (p.detach() - value) / len(clients)
    with torch.no_grad():
        for p, value, movement in zip(model.trained(), start, total, strict=True):
            p.copy_(value + movement)


def quiet_trainer(epochs: int, *callbacks: L.Callback) -> L.Trainer:
    """Trainer that neither saves nor shows anything."""
    return L.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks],
    )


def compare(width: int, rounds: int) -> tuple[float, float, float]:
    """Milliseconds of a hand-written step, and the ratios of the loop's rounds and of plain epochs to rounds by hand.

    A plain epoch has as many batches as a round, and no federation: what remains above 1 there is Lightning's.
    """
    data = Data(width, examples=BATCH * STEPS * COHORT)
    shares = np.split(np.arange(len(data.set)), COHORT)
    twin = Net(width)
    wrapper = FederatedWrapper(data, lambda dataset: {str(i): rows for i, rows in enumerate(shares)})
    loop = FederatedLoop(clients_per_round=COHORT, local_steps=STEPS)
    ratios = []
    for datamodule, callbacks in ((wrapper, [loop]), (data, [])):
        clock = RoundClock(lambda: round_by_hand(twin, data.set, shares))
        quiet_trainer(rounds + 1, *callbacks, clock).fit(Net(width), datamodule=datamodule)
        hand, ours = clock.hand_seconds[1:], clock.lightning_seconds[1:]  # the first round warms up
        ratios.append(statistics.median(a / b for a, b in zip(ours, hand, strict=True)))
    return 1000 * statistics.median(hand) / (COHORT * STEPS), *ratios


def peak_memory(clients: int) -> None:
    """Prints the peak memory of this process, in MiB, after some rounds with that many clients of 2 examples."""
    data = Data(256, examples=20_000)
    trainer = quiet_trainer(3, FederatedLoop(clients_per_round=COHORT, local_steps=STEPS))
    split = np.array_split(np.arange(20_000), clients)
    wrapper = FederatedWrapper(data, lambda dataset: {str(i): rows for i, rows in enumerate(split)})
    trainer.fit(Net(256), datamodule=wrapper)
    peak = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")
    )
    print(int(peak.split()[1]) / 1024)


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS, help="of the layers")
    parser.add_argument("--json", type=Path, help="where the rows go as well")
    parser.add_argument("--clients", type=int, help="only the peak memory with that many clients")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    if options.clients:
        peak_memory(options.clients)
        return
    print(f"{COHORT} clients x {STEPS} steps a round, batch {BATCH}, {torch.get_num_threads()} threads")
    rows: list[dict[str, Any]] = []
    for width in options.widths:
        milliseconds, ratio, lightning = compare(width, options.rounds)
        row = {"trained": "adapters", "size": f"width {width}", "ms": milliseconds}
        rows.append({**row, "ratio": ratio, "lightning": lightning})
    for clients in (10, 1_000, 10_000):
        command = [sys.executable, __file__, "--clients", str(clients)]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        rows.append(
            {"trained": "adapters", "size": f"{clients} clients", "peak_mib": float(output.split()[-1])}
        )
    show(rows, options.json)


if __name__ == "__main__":
    main()
