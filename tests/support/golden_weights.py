"""Weights of small runs of every kind after rounds 1, 3 and the last, and tables of visits: ``tests/golden/weights.json``.

``make golden`` says which runs end with other weights or visits, and how far the weights are away.
``golden_weights.py NAME ...`` runs these alone, and ``--write`` renews the file.

A state is kept as its norm and its products with eight fixed random directions, in fp64. The products of a difference have
its length as standard deviation, so eight of them say how large it is without a copy of the state.
"""

import argparse
import csv
import hashlib
import json
import logging
import math
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import lightning as L
import numpy as np
import torch
from memories import loop_with
from plain_lightning import Numbers
from shared_runs import KINDS, Kind, write_devices
from stacked import Lora, Points
from tiny_world import HELDOUT, VOTES, make_model

from fedlight.callbacks.logs.visit_log import VisitLog
from fedlight.callbacks.loop.federated_loop import FederatedLoop
from fedlight.datamodules.federated.by_client import FederatedWrapper
from fedlight.datamodules.instructions.datamodule import InstructionDataModule
from fedlight.datamodules.preferences.datamodule import PreferenceDataModule
from fedlight.datamodules.rows.split import Split
from fedlight.federation.aggregation import CoordinateMedian
from fedlight.federation.server import FedAdagrad, FedAvgM, FedYogi
from fedlight.modules.dpo import DPOModule
from fedlight.modules.language import adapters
from fedlight.modules.language.optimizers import Optimization
from fedlight.modules.reward import RewardModule
from fedlight.modules.selector import SelectorModule
from fedlight.modules.sft import SFTModule

FILE = Path(__file__).parent.parent / "golden/weights.json"
ROUNDS = (1, 3)
SINGLE = ("fewfedpit", "clients_at_once", "selector", "dpo", "reward", "sft")
"""Runs with parts in fp32; all others are in fp64, which differs little between processors."""
SAME, SAME_SINGLE = 1e-9, 1e-3
"""Largest distance of two states that count as equal, relative to their norm."""
DIRECTIONS = 8
QUIET = {
    **{"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False},
    **{"enable_model_summary": False, "num_sanity_val_steps": 0},
}


def language(module, data, **settings) -> dict:
    """A run of a module of a paper, over a language model of two narrow layers with ranks of LoRA."""

    def make(root: Path) -> Kind:
        folder = str(root / "model")
        model = lambda: module(  # noqa: E731
            folder,
            dtype="fp32",
            optimizer=Optimization(name="SGD"),
            lr=0.01,
            lora=adapters.Lora(rank=2, dropout=0.1),
        )
        return Kind(dict(settings), model, lambda: data(folder))

    return make


def votes(view: str):
    """Votes of six clients as a view of `PreferenceDataModule` has them."""
    return lambda folder: PreferenceDataModule(
        VOTES, split=Split(test_source=HELDOUT), view=view, tokenizer=folder, batch_size=4
    )


def instructions(folder: str) -> InstructionDataModule:
    """Instructions of the embedded world."""
    return InstructionDataModule(
        "toy:instructions?client_rows=6", tokenizer=folder, batch_size=4, split=Split(val_share=0.0)
    )


MORE = {
    "fedavgm": lambda root: Kind({"server": FedAvgM()}),
    "fedadagrad": lambda root: Kind({"server": FedAdagrad()}),
    "fedyogi": lambda root: Kind({"server": FedYogi()}),
    "median": lambda root: Kind({"aggregation": CoordinateMedian()}),
    "clients_at_once": lambda root: Kind({"clients_at_once": 3}, Lora, Points, {"limit_val_batches": 0}),
    "selector": language(SelectorModule, votes("selector")),
    "dpo": language(DPOModule, votes("dpo")),
    "reward": language(RewardModule, votes("dpo")),
    "sft": language(SFTModule, instructions),
}
LEFT_OUT = ("early_stopping", "one_over_the_limit", "all_over_the_limit", "emptied_on_disk")
"""Kinds of runs for other tests: when a run stops, and where memories lie."""
RUNS = {**{name: kind for name, kind in KINDS.items() if name not in LEFT_OUT}, **MORE}


class States(L.Callback):
    """States after the rounds that are kept and after the last one, and what clients remember then."""

    def __init__(self, loop: FederatedLoop) -> None:
        self.loop, self.kept = loop, {}

    def on_train_epoch_end(self, trainer, pl_module):
        if (done := trainer.current_epoch + 1) in (*ROUNDS, trainer.max_epochs):
            remembered = {client: self.loop.memory.load(client) for client in self.loop.clients}
            self.kept[str(done)] = summary({"module": pl_module.state_dict(), "clients": remembered})


def numbers(state) -> list[torch.Tensor]:
    """All floating-point tensors of nested values, flat and in the order of their names."""
    if isinstance(state, Mapping):
        return [flat for name in sorted(state, key=str) for flat in numbers(state[name])]
    if isinstance(state, (list, tuple)):
        return [flat for part in state for flat in numbers(part)]
    return (
        [state.cpu().double().flatten()]
        if isinstance(state, torch.Tensor) and state.is_floating_point()
        else []
    )


def summary(state: Mapping) -> dict:
    """Norm of a state, and its products with fixed random directions."""
    whole = torch.cat(numbers(state)).numpy()
    directions = np.random.default_rng(0).standard_normal((DIRECTIONS, len(whole)))
    return {
        "numbers": len(whole),
        "norm": float(np.linalg.norm(whole)),
        "products": [float(math.fsum(whole * direction)) for direction in directions],
    }


def run(name: str, root: Path) -> dict:
    """Train; return the summaries of the states and a digest of the table of visits."""
    kind, folder = RUNS[name](root), root / name
    L.seed_everything(0, verbose=False)
    model, loop = kind.model(), loop_with(**{"clients_per_round": 4, "local_steps": 2} | kind.loop)
    model.loop, states = loop, States(loop)
    data = kind.data() if kind.data else FederatedWrapper(Numbers(), kind.clients)
    trainer = L.Trainer(
        max_epochs=kind.rounds,
        default_root_dir=folder,
        callbacks=[loop, VisitLog(), states],
        precision="32-true" if name in SINGLE else "64-true",
        **QUIET | kind.settings,
    )
    trainer.fit(model, data)
    return {"states": states.kept, "visits": visits(folder / "visits.csv", whole=name in SINGLE)}


def visits(file: Path, whole: bool) -> str:
    """Digest of a table of visits to nine digits, without seconds; ``whole``: without all that is no whole number."""
    rows = [
        {column: rounded(value, whole) for column, value in row.items() if column != "seconds"}
        for row in csv.DictReader(file.read_text().splitlines())
    ]
    return hashlib.blake2b(json.dumps(rows, sort_keys=True).encode(), digest_size=12).hexdigest()


def rounded(value: str, whole: bool) -> str:
    """A number of a table to nine digits, or nothing where it has a fraction and ``whole``; other text as it is."""
    try:
        number = float(value)
    except ValueError:
        return value
    return "" if whole and not number.is_integer() else f"{number:.9g}"


def differences(name: str, now: Mapping, before: Mapping) -> list[str]:
    """One line for each state that is not the one on file, and for the table of visits."""
    lines = []
    for after, state in before["states"].items():
        other = now["states"].get(after, {"numbers": 0})
        if other["numbers"] != state["numbers"]:
            lines.append(f"{name}, round {after}: {other['numbers']} numbers, on file {state['numbers']}")
            continue
        distance = float(np.sqrt(np.mean(np.square(np.subtract(other["products"], state["products"])))))
        if not distance <= (SAME_SINGLE if name in SINGLE else SAME) * state["norm"]:
            lines.append(
                f"{name}, round {after}: weights are {distance / state['norm']:.1e} of their norm away"
            )
    if now["visits"] != before["visits"]:
        lines.append(f"{name}: other rows of visits.csv")
    return lines


def prepared(root: Path) -> Path:
    """Write what the runs read."""
    write_devices(root)
    make_model(root / "model")
    return root


def main() -> int:
    """Run all, or those that are named; 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *RUNS])
    parser.add_argument("--write", action="store_true", help="renew the file")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        root = prepared(Path(folder))
        now = {name: run(name, root) for name in arguments.names or RUNS}
    before = json.loads(FILE.read_text()) if FILE.exists() else {}
    lines = [line for name in now for line in differences(name, now[name], before.get(name, now[name]))]
    print("\n".join(lines) or f"{len(now)} runs end with the weights and visits on file")
    if arguments.write:
        kept = {name: now.get(name) or before[name] for name in RUNS}
        FILE.write_text(json.dumps(kept, indent=1) + "\n")
    return int(bool(lines) and not arguments.write)


if __name__ == "__main__":
    sys.exit(main())
