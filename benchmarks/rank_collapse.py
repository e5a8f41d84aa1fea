"""Rank collapse: how much of the global adapter lies beyond the smallest client's rank, by method and round.

Clients of unlike LoRA ranks learn one linear map together, whose difference from the frozen base has as many equal singular
values as the module's rank R. ``energy`` is the share of the squared singular values of the global product B A beyond the
smallest rank r, which is (R - r) / R in the map that is looked for; ``loss`` is the squared distance from that map over that
of the base alone. Wu et al., "Preventing Rank Collapse in Federated Low-Rank Adaptation with Client Heterogeneity", 2026,
https://arxiv.org/abs/2602.13486, report the collapse for averages of the factors and of the products.

* zero-padding: factors padded with zeros, plain means; HetLoRA: weighted by the norm of the products
* FlexLoRA: means of the products, cut by singular values
* "over holders": each row or direction is the mean over the clients that have it (raFLoRA)
* largest rank, smallest rank: all clients have it, whatever their devices

Run: OMP_NUM_THREADS=1 python benchmarks/rank_collapse.py [--rounds 20] [--json FILE]
"""

import argparse
import logging
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from shown_rows import show
from torch import Tensor, nn

from fedlight import Algorithm, FederatedDataModule, FederatedLoop
from fedlight.federation.algorithms.lora import FlexLoRA, HetLoRA
from fedlight.federation.lora.products import Term, singular_vectors

INNER, OUT, RANK = 24, 16, 8
CLIENT_RANKS = (2, 2, 2, 2, 2, 2, 4, 8)
EXAMPLES, BATCH, STEPS = 128, 32, 8
SHOWN = (1, 5, 10, 20)
"""Rounds with a row."""

Row = dict[str, Any]


def sought() -> tuple[Tensor, Tensor]:
    """Return the frozen base and the map that is looked for, ``(OUT, INNER)``; their difference has singular values 1."""
    stream = torch.Generator().manual_seed(0)
    base = torch.randn(OUT, INNER, generator=stream) / INNER**0.5
    u = torch.linalg.qr(torch.randn(OUT, RANK, generator=stream))[0]
    v = torch.linalg.qr(torch.randn(INNER, RANK, generator=stream))[0]
    return base, base + u @ v.T


class Points(FederatedDataModule):
    """Inputs and the map's outputs, with a little noise, for clients of one distribution."""

    def __init__(self) -> None:
        super().__init__(batch_size=BATCH)

    def setup(self, stage: str | None = None) -> None:
        """Draw the points."""
        stream = torch.Generator().manual_seed(1)
        total = EXAMPLES * len(CLIENT_RANKS)
        self.x = torch.randn(total, INNER, generator=stream)
        self.y = self.x @ sought()[1].T + 0.1 * torch.randn(total, OUT, generator=stream)
        self.train_set = range(total)
        self.client_indices = {
            name: np.arange(number * EXAMPLES, (number + 1) * EXAMPLES)
            for number, name in enumerate(client_ranks())
        }

    def collate(self, examples: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return inputs and outputs of some points."""
        return self.x[list(examples)], self.y[list(examples)]


class Map(L.LightningModule):
    """LoRA on one frozen linear layer; B starts at 0."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        net = nn.Sequential(nn.Linear(INNER, OUT, bias=False))
        with torch.no_grad():
            net[0].weight.copy_(sought()[0])
        self.net = get_peft_model(net, LoraConfig(r=RANK, lora_alpha=RANK, target_modules=["0"]))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean squared error."""
        return (self.net(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over the factors."""
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.02, weight_decay=0.0)

    def product(self) -> tuple[Tensor, Tensor]:
        """Return B and A."""
        layer = self.net.base_model.model[0]
        return layer.lora_B["default"].weight.detach(), layer.lora_A["default"].weight.detach()


def client_ranks() -> dict[str, int]:
    """Return client -> rank."""
    return {f"c{number}": rank for number, rank in enumerate(CLIENT_RANKS)}


class Watch(L.Callback):
    """Energy beyond the smallest rank and the error after each round."""

    def __init__(self, method: str, smallest: int) -> None:
        self.method, self.smallest = method, smallest
        self.rows: list[Row] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Add a row."""
        assert isinstance(pl_module, Map)
        number = trainer.current_epoch + 1
        if number not in SHOWN and number != trainer.max_epochs:
            return
        b, a = pl_module.product()
        base, whole = sought()
        squares = singular_vectors([Term(1.0, b.double(), a.double())])[1].square()
        error = (base + b @ a - whole).square().sum() / (base - whole).square().sum()
        energy = squares[self.smallest :].sum() / squares.sum()
        self.rows.append(
            {"method": self.method, "round": f"{number}", "energy": energy.item(), "loss": error.item()}
        )


METHODS: dict[str, tuple[Callable[..., Algorithm], int | None]] = {
    "zero-padding": (partial(HetLoRA, sparsity_weighted=False), None),
    "HetLoRA": (HetLoRA, None),
    "FlexLoRA": (FlexLoRA, None),
    "zero-padding, over holders": (partial(HetLoRA, sparsity_weighted=False, missing="skip"), None),
    "FlexLoRA, over holders": (partial(FlexLoRA, missing="skip"), None),
    "FlexLoRA, largest rank": (FlexLoRA, RANK),
    "FlexLoRA, smallest rank": (FlexLoRA, min(CLIENT_RANKS)),
}
"""Name -> algorithm, and the rank of all clients; None for unlike ones."""


def measure(method: str, rounds: int) -> list[Row]:
    """Return the rows of one method."""
    make, rank = METHODS[method]
    ranks = client_ranks() if rank is None else dict.fromkeys(client_ranks(), rank)
    loop = FederatedLoop(make(ranks=ranks), clients_per_round=len(ranks), local_steps=STEPS)
    watch = Watch(method, min(CLIENT_RANKS))
    trainer = L.Trainer(
        max_epochs=rounds,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[loop, watch],
    )
    trainer.fit(Map(), Points())
    return watch.rows


def main(argv: Sequence[str] | None = None) -> None:
    """Print the rows and write them to ``--json``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for method in METHODS:
            rows += measure(method, options.rounds)
    show(rows, options.json)


if __name__ == "__main__":
    main()
