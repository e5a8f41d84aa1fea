"""How fast a report of a large run is made and opened: 500 rounds, 200 clients, every client validated in each round.

Writes the files that such a run leaves, in their real formats and with made-up numbers, makes the page and opens it in a
headless Chromium: ``python benchmarks/report.py [--rounds 500] [--clients 200] [--folder DIR]``.
"""

import argparse
import csv
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from fedlight.report import write_report

CHROMIUM = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
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
        visits += [_visit(place, names[client], loss, rng) for client in cohort]
        accuracies += [
            {
                **{
                    "stage": "val",
                    "round": place,
                    "client": names[client],
                    "examples": 50,
                    "group": "",
                    "selector": 0,
                },
                **{"accuracy": own[client], "own_accuracy": own[client]},
            }
            for client in range(clients)
        ]
        if place % max(1, rounds // 10) == 0:
            groups += [{"round": place, "client": name, "selector": int(rng.integers(3))} for name in names]
    metrics_file = folder / "metrics" / "version_0" / "metrics.csv"
    for file, rows in ((metrics_file, metrics), (folder / "visits.csv", visits)):
        _write(file, rows)
    _write(folder / "clients.csv", accuracies)
    _write(folder / "groups.csv", groups)
    _write(
        folder / "data.csv",
        [
            {"client": name, "label": label, "split": "train", "rows": int(rng.integers(1, 200))}
            for name in names
            for label in ("warm", "brief", "thorough")
        ],
    )
    lines = [{"fields": {"prompt": f"prompt {n}"}, "completions": [f"answer {n}"]} for n in range(500)]
    (folder / "completions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _visit(place: int, client: str, loss: float, rng: np.random.Generator) -> dict[str, Any]:
    absent = bool(rng.random() < 0.1)
    return {
        **{"round": place, "client": client, "split": "train", "steps": 0 if absent else 5, "examples": 100},
        **{
            "loss": "" if absent else loss + rng.normal(0, 0.05),
            "bytes_down": 229312,
            "bytes_up": 0 if absent else 229312,
        },
        **{
            "seconds": 1.0,
            "device": ("phone", "laptop")[int(rng.integers(2))],
            "reason": "absent" if absent else "",
        },
        **{
            "weight_bits": 16,
            "micro_batch": 8,
            "checkpointing": 0,
            "base_bytes": 859776,
            "adapter_bytes": 225280,
        },
        **{
            "gradient_bytes": 225280,
            "moment_bytes": 450560,
            "activation_bytes": 38646240,
            "peak_bytes": 40407136,
        },
        **{"budget_bytes": 42949672, "flops": 1e9, "download_seconds": 1.0, "compute_seconds": 10.0},
        **{
            "upload_seconds": 2.0,
            "joules": 30.0,
            "round_start_seconds": 20.0 * place,
            "round_end_seconds": 20.0 * place + 18,
        },
    }


def _write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="", encoding="utf-8") as lines:
        writer = csv.DictWriter(
            lines, list(dict.fromkeys(key for row in rows[:10] for key in row)), restval=""
        )
        writer.writeheader()
        writer.writerows(rows)


def seconds_to_open(page: Path) -> float | None:
    """From navigation to the end of the load event in a headless Chromium; None where there is no Chromium."""
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        return None
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=CHROMIUM)
        tab = browser.new_page()
        tab.goto(page.absolute().as_uri())
        found: float = tab.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
        browser.close()
    return found / 1000


def main() -> None:
    """Prints seconds and size."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--folder", type=Path, help="where the run and the page are kept; default: nowhere")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        write_run(folder / "run", options.rounds, options.clients)
        begun = time.perf_counter()
        page = write_report([folder / "run"])
        made = time.perf_counter() - begun
        opened = seconds_to_open(page)
        shown = "no Chromium here" if opened is None else f"opened in {opened:.2f} s"
        size = page.stat().st_size / 2**20
        run = f"{options.rounds} rounds, {options.clients} clients"
        print(f"{run}: made in {made:.1f} s, {size:.2f} MiB, {shown}")


if __name__ == "__main__":
    main()
