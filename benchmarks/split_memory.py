"""Peak of memory of full fine-tuning with several processes for one client, each way in fresh processes.

A round of two clients, each with two steps of AdamW on random tokens, on the language model in the folder ``--model`` in
fp32; one thread a process. ``split`` divides the trained weights of repeated layers (``split_trained``); without it each
process has whole ones. A peak is the most memory that a process occupied (``ru_maxrss``), imports and loading included. The
run ends with an error if a way's model is not that of one process up to rounding.

Run: python benchmarks/split_memory.py --model FOLDER [--ways 1 2 "2 split" "4 split"] [--size 4x32] [--json FILE]
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WAYS = ("1", "2", "2 split", "4 split")
STEPS = 2
APART = 1e-5
"""Largest difference of a weight from that of one process."""


def train(folder: Path, model: str, way: str, size: Sequence[int]) -> None:
    """Train in this process, one of those of a way; the peak and the first layer's weights go to ``folder``."""
    import lightning as L
    import torch
    from torch.utils.data import DataLoader
    from transformers import AutoConfig, AutoModelForCausalLM

    from fedlight import FederatedLoop, FederatedWrapper
    from fedlight.processes.strategy import ClientParallelStrategy

    class Tuned(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
            self.model.train()

        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
            return self.model(**batch, labels=batch["input_ids"]).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-5)

    class Texts(L.LightningDataModule):
        def train_dataloader(self) -> DataLoader[Any]:
            shape = (2 * STEPS * size[0], size[1])
            stream = torch.Generator().manual_seed(0)
            ids = torch.randint(AutoConfig.from_pretrained(model).vocab_size, shape, generator=stream)
            rows: Any = [{"input_ids": row} for row in ids]
            return DataLoader(rows, batch_size=size[0])

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    number, split = int(way.split()[0]), "split" in way
    several: dict[str, Any] = {}
    if number > 1:
        strategy = ClientParallelStrategy(processes_per_client=number, split_trained=split)
        several = {"strategy": strategy, "devices": number}
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=[FederatedLoop(clients_per_round=2, local_steps=STEPS)],
        default_root_dir=folder,
        **quiet,
        **several,
    )
    half = STEPS * size[0]
    data = FederatedWrapper(Texts(), lambda rows: {"a": range(half), "b": range(half, 2 * half)})
    trainer.fit(Tuned(), data)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    state = trainer.strategy.lightning_module_state_dict()
    rank = trainer.strategy.global_rank
    (folder / f"peak_{rank}").write_text(str(peak))
    if rank == 0:
        torch.save({name: value for name, value in state.items() if ".0." in name}, folder / "weights")


def measure(model: str, ways: Sequence[str], size: str) -> list[dict[str, Any]]:
    """Rows of the table, one for each way."""
    import torch

    # Freed blocks go back to the system at once, so that a peak is of memory in use.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "262144"}
    rows: list[dict[str, Any]] = []
    first: dict[str, Any] = {}
    for way in ways:
        with tempfile.TemporaryDirectory() as name:
            command = [
                sys.executable,
                __file__,
                "--model",
                model,
                "--ways",
                way,
                "--size",
                size,
                "--here",
                name,
            ]
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
            peaks = [float((Path(name) / f"peak_{rank}").read_text()) for rank in range(int(way.split()[0]))]
            state = torch.load(Path(name) / "weights", weights_only=True)
        first = first or state
        apart = max(float((state[name] - weight).abs().max()) for name, weight in first.items())
        if apart > APART:
            raise SystemExit(f"{way}: a weight is {apart:.2g} from that of {ways[0]} process")
        rows.append({"way": way, "first": peaks[0]} | ({"others": max(peaks[1:])} if peaks[1:] else {}))
        print(rows[-1], flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, help="folder of a language model")
    parser.add_argument("--ways", nargs="+", default=WAYS)
    parser.add_argument("--size", default="4x32", help="texts and tokens of a batch")
    parser.add_argument("--json", type=Path, help="where the rows go as well")
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.here:
        train(options.here, options.model, options.ways[0], [*map(int, options.size.split("x"))])
        return
    rows = measure(options.model, options.ways, options.size)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
