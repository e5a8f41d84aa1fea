"""Cost of a round late in a long run against an early one: seconds, open files and memory, with all logs and an attack on.

One federation of 8 clients trains linear adapters by FedBiscuit, which groups the clients in every round. `VisitLog`,
`GroupLog`, `ClientAccuracy`, membership inference on the server's model and on every upload, Lightning's CSV logger, its
checkpoints of every round and `RoundProgress` are on. Reported are medians over ``--window`` rounds from each mark on: wall
clock, CPU time of the process, the checkpoint's size, open file descriptors and resident memory. On a busy machine compare
the CPU times.

Run: python benchmarks/long_runs.py [--rounds 5000] [--window 50] [--json FILE]
"""

import argparse
import json
import logging
import os
import resource
import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from torch import nn
from torch.utils.data import TensorDataset

from fedlight.callbacks.attacks.membership_inference import MembershipInference
from fedlight.callbacks.logs.client_accuracy import ClientAccuracy
from fedlight.callbacks.logs.group_log import GroupLog
from fedlight.callbacks.logs.visit_log import VisitLog
from fedlight.callbacks.loop.federated_loop import FederatedLoop
from fedlight.callbacks.progress.round_progress import RoundProgress
from fedlight.datamodules.federated.datamodule import FederatedDataModule
from fedlight.evaluation.tasks.model import Likelihood
from fedlight.federation.algorithms.fedbiscuit import FedBiscuit

MARKS = (10, 1_000, 5_000)
CLIENTS, COHORT, STEPS, WIDTH, ROWS = 8, 4, 2, 4, 12


class Selectors(L.LightningModule):
    """Two linear selectors, which score a choice between two answers and, for the attack, a text by its length."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter_names = ["first", "second"]
        self.parts = nn.ModuleDict({name: nn.Linear(WIDTH, 1) for name in self.adapter_names})
        self.active = "first"

    def use_adapter(self, name: str) -> None:
        """Train and evaluate with this adapter."""
        self.active = name

    def example_losses(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Return the squared error of each example, ``(batch,)``."""
        errors: torch.Tensor = self.parts[self.active](batch[0]) - batch[1]
        return errors.square()[:, 0]

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the mean loss."""
        return self.example_losses(batch).mean()

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> dict[str, torch.Tensor]:
        """Return which of the two selectors has the right sign."""
        scores = torch.cat([part(batch[0]) for part in self.parts.values()], dim=1)
        return {"correct": scores * batch[1] > 0}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD over both selectors."""
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def log_likelihoods(
        self, prompts: Sequence[str], continuations: Sequence[Sequence[str]], raw: bool
    ) -> list[list[Likelihood]]:
        """Return a made-up likelihood of each text."""
        own = 0.0 if raw else float(next(self.parameters()).detach().sum())
        return [[Likelihood(-abs(own + len(text)), 1, False) for text in texts] for texts in continuations]

    def fits(self, prompts: Sequence[str], new_tokens: int) -> list[bool]:
        """Return that every prompt fits."""
        return [True] * len(prompts)


class Prompt(NamedTuple):
    """Prompt of a row."""

    text: str = "{instruction}"
    without: None = None

    def render(self, fields: dict[str, str]) -> "Prompt":
        """Return the row's instruction."""
        return Prompt(fields["instruction"])

    def continuation(self, response: str) -> str:
        """Return the response after a blank."""
        return f" {response}"


class Choices(FederatedDataModule):
    """Random choices; half of the clients want the opposite of the others."""

    template = Prompt()
    planted: ClassVar[dict[str, list[dict[str, str]]]] = {}

    def setup(self, stage: str) -> None:
        """Make the examples."""
        x = torch.randn(CLIENTS * ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
        signs = torch.arange(CLIENTS).remainder(2).mul(2).sub(1).repeat_interleave(ROWS)
        self.train_set = self.val_set = TensorDataset(x, x.sum(1, keepdim=True).sign() * signs[:, None])
        own = dict(
            zip([f"client{n}" for n in range(CLIENTS)], np.split(np.arange(len(x)), CLIENTS), strict=True)
        )
        self.client_indices = {client: rows[:-4] for client, rows in own.items()}
        self.val_client_indices = {client: rows[-4:] for client, rows in own.items()}
        self.client_rows = {client: [self._row(client, n) for n in range(3)] for client in own}

    def unseen_rows(self) -> list[dict[str, str]]:
        """Return rows that no client has."""
        return [self._row("nobody", number) for number in range(6)]

    def collate(self, examples: list[Any]) -> list[torch.Tensor]:
        """Return inputs and targets."""
        return [torch.stack(column) for column in zip(*examples, strict=True)]

    @staticmethod
    def _row(client: str, number: int) -> dict[str, str]:
        return {"instruction": f"question {number}", "response": client * (number + 1)}


class Meter(L.Callback):
    """Measures the rounds that count, each from its start to the start of the next."""

    def __init__(self, rounds: Sequence[range], folder: Path) -> None:
        self.measured: dict[int, list[dict[str, float]]] = {one.start: [] for one in rounds}
        self.rounds, self.folder = rounds, folder
        self._begun: tuple[float, float] | None = None

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note the round that is over."""
        now = time.perf_counter(), time.process_time()
        for mark in (one.start for one in self.rounds if trainer.current_epoch in one):
            assert self._begun is not None
            wall, cpu = (after - before for after, before in zip(now, self._begun, strict=True))
            last = max(self.folder.glob("*.ckpt"), key=lambda file: file.stat().st_mtime)
            self.measured[mark].append(
                {
                    "milliseconds": 1000 * wall,
                    "cpu_milliseconds": 1000 * cpu,
                    "checkpoint_kb": last.stat().st_size / 1000,
                    "descriptors": len(os.listdir("/proc/self/fd")),
                    "resident_mib": _resident_mib(),
                }
            )
        self._begun = time.perf_counter(), time.process_time()


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def measure(rounds: int, window: int, folder: Path) -> list[dict[str, float]]:
    """Return the medians at each mark up to ``rounds``."""
    marks = [range(mark, mark + window) for mark in MARKS if mark <= rounds]
    meter = Meter(marks, folder / "checkpoints")
    progress = RoundProgress()
    progress.console = Console(quiet=True)
    trainer = L.Trainer(
        max_epochs=marks[-1].stop,
        accelerator="cpu",
        default_root_dir=folder,
        logger=CSVLogger(folder, "metrics"),
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[
            FederatedLoop(FedBiscuit(1, 1), clients_per_round=COHORT, local_steps=STEPS),
            *(VisitLog(), GroupLog(), ClientAccuracy(), progress, meter),
            MembershipInference(examples=6, targets=("global", "uploads")),
            ModelCheckpoint(folder / "checkpoints", save_last=True),
        ],
    )
    trainer.fit(Selectors(), datamodule=Choices(batch_size=4))
    return [
        {"round": mark} | {name: statistics.median(one[name] for one in measured) for name in measured[0]}
        for mark, measured in meter.measured.items()
    ]


def main() -> None:
    """Print a line for each mark."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=MARKS[-1], help="last mark")
    parser.add_argument("--window", type=int, default=50, help="rounds of a median")
    parser.add_argument("--json", type=Path, help="file for the rows")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(
        logging.ERROR
    )  # a line for each attack
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(options.rounds, options.window, Path(folder))
    for row in rows:
        print("  ".join(f"{name} {value:,.1f}" for name, value in row.items()))
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
