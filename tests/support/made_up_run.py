"""The files that a run of many clients on devices leaves, in their real formats and with made-up numbers."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np

CONFIG = """\
seed_everything: 0
trainer: {max_epochs: %d}
model: {class_path: fedlight.modules.selector.SelectorModule, init_args: {model: toy}}
data: {class_path: fedlight.datamodules.preferences.datamodule.PreferenceDataModule, init_args: {source: 'toy:votes'}}
federated:
  class_path: fedlight.callbacks.loop.federated_loop.FederatedLoop
  init_args: {clients_per_round: 20, algorithm: {class_path: fedlight.federation.algorithms.fedbiscuit.FedBiscuit}}
"""


def write_run(folder: Path, rounds: int, clients: int, seed: int = 0) -> None:
    """The files of one run: metrics, visits on devices, accuracies by client, groups, config.

    Args:
        folder: is made.
        rounds: of training, at least 1.
        clients: validated after each round; a tenth of them, at least one, is trained.
        seed: of the numbers.
    """
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(CONFIG % rounds)
    names = [f"c{place:03d}" for place in range(clients)]
    level = rng.uniform(0.5, 0.8, clients)
    metrics, visits, accuracies, groups = [], [], [], []
    for place in range(rounds):
        learned = 1 - np.exp(-4 * (place + 1) / rounds)
        own = np.clip(0.5 + (level - 0.4) * learned + rng.normal(0, 0.02, clients), 0, 1)
        loss = 0.7 - 0.4 * learned + rng.normal(0, 0.02)
        metrics += [
            {"epoch": place, "step": 5 * place + step, "train/loss": loss, "val/loss": ""}
            for step in range(5)
        ]
        metrics.append(
            {
                "epoch": place,
                "step": 5 * place + 4,
                "train/loss": "",
                "val/loss": loss + 0.05,
                "val/accuracy": own.mean(),
            }
        )
        cohort = rng.choice(clients, max(1, clients // 10), replace=False)
        visits += [visit(place, names[client], loss, rng) for client in cohort]
        told = {"stage": "val", "round": place, "examples": 50, "group": "", "selector": 0}
        accuracies += [
            told | {"client": name, "accuracy": value, "own_accuracy": value}
            for name, value in zip(names, own, strict=True)
        ]
        if place % max(1, rounds // 10) == 0:
            groups += [{"round": place, "client": name, "selector": int(rng.integers(3))} for name in names]
    metrics_file = folder / "metrics" / "version_0" / "metrics.csv"
    for file, rows in ((metrics_file, metrics), (folder / "visits.csv", visits)):
        write_table(file, rows)
    write_table(folder / "clients.csv", accuracies)
    write_table(folder / "groups.csv", groups)
    write_table(
        folder / "data.csv",
        [
            {"client": name, "label": label, "split": "train", "rows": int(rng.integers(1, 200))}
            for name in names
            for label in ("warm", "brief", "thorough")
        ],
    )
    lines = [{"fields": {"prompt": f"prompt {n}"}, "completions": [f"answer {n}"]} for n in range(500)]
    (folder / "completions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def visit(place: int, client: str, loss: float, rng: np.random.Generator) -> dict[str, Any]:
    """Return a row of visits.csv."""
    absent = bool(rng.random() < 0.1)
    told = {"round": place, "client": client, "split": "train", "steps": 0 if absent else 5, "examples": 100}
    told |= {"loss": "" if absent else loss + rng.normal(0, 0.05), "seconds": 1.0}
    told |= {"bytes_down": 229312, "bytes_up": 0 if absent else 229312}
    told |= {"device": ("phone", "laptop")[int(rng.integers(2))], "reason": "absent" if absent else ""}
    told |= {
        "weight_bits": 16,
        "micro_batch": 8,
        "checkpointing": 0,
        "base_bytes": 859776,
        "adapter_bytes": 225280,
    }
    told |= {"gradient_bytes": 225280, "moment_bytes": 450560, "activation_bytes": 38646240}
    told |= {"peak_bytes": 40407136, "budget_bytes": 42949672, "flops": 1e9, "joules": 30.0}
    told |= {"download_seconds": 1.0, "compute_seconds": 10.0, "upload_seconds": 2.0}
    return told | {"round_start_seconds": 20.0 * place, "round_end_seconds": 20.0 * place + 18}


def write_table(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="", encoding="utf-8") as lines:
        writer = csv.DictWriter(
            lines, list(dict.fromkeys(key for row in rows[:10] for key in row)), restval=""
        )
        writer.writeheader()
        writer.writerows(rows)
