"""A client of the shape of Qwen2-0.5B on a device with 2 GiB: out of memory by backpropagation, not by forward passes.

The model has random weights in bf16, saved by qwen_round.py. One client has one text of ``--tokens`` tokens, all of them
labelled, for supervised tuning with LoRA of rank 8, and one step. Each way runs in a separate process.

* predicted: memory of the visit as the emulator forecasts it, the base included, in GiB
* allocator: the model's weights, and the most that torch's allocator had given out at once beside them in the whole run,
  of a client that took part
* resident: highest resident memory of the process (VmHWM) less that after the imports, with the file of the model, buffers
  of libraries and the profiler

Run: OMP_NUM_THREADS=1 python benchmarks/small_device.py [--tokens 640] [--json FILE]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from qwen_round import GIB, SHAPE, peak_bytes, save_model
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fedlight import FederatedDataModule, FederatedLoop, Fleet, SFTModule
from fedlight.federation.forward import ZerothOrder
from fedlight.modules.language.adapters import Lora

DEVICE = """memory_gib: 4
memory_share: 0.5
tflops: 0.75
download_mbps: 56
upload_mbps: 17
watts: 4
weight_bits: 16
"""


class OneText(FederatedDataModule):
    """One random text of one client, labelled from its second token on."""

    def __init__(self, tokens: int) -> None:
        super().__init__(batch_size=1)
        self.tokens = tokens

    def setup(self, stage: str | None = None) -> None:
        """Say whose text it is, and how long."""
        self.train_set = [0]
        self.client_indices = {"client": np.array([0])}
        self.train_lengths, self.train_labelled = np.array([self.tokens]), np.array([self.tokens - 1])

    def collate(self, examples: Sequence[int]) -> dict[str, Tensor]:
        """Return the text as a batch."""
        stream = torch.Generator().manual_seed(0)
        ids = torch.randint(5, SHAPE["vocab_size"], (len(examples), self.tokens), generator=stream)
        labels = ids.clone()
        labels[:, 0] = -100
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def measure(folder: str, train: str, tokens: int) -> dict[str, Any]:
    """Return the row of a way of training; the memory is that of this process."""
    import peft  # noqa: F401
    from transformers import Qwen2ForCausalLM  # noqa: F401

    warnings.filterwarnings("ignore")
    device = Path(folder) / "small.yaml"
    device.write_text(DEVICE, encoding="utf-8")
    before = peak_bytes()
    module = SFTModule(folder, dtype="bf16", lora=Lora(rank=8, dropout=0.0), lr=1e-4)
    forward = None if train == "backprop" else ZerothOrder(only_where_needed=True)
    loop = FederatedLoop(clients_per_round=1, local_steps=1, forward=forward, fleet=Fleet({str(device): 1.0}))
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[loop],
    )
    module.configure_model()
    weights = sum(parameter.nbytes for parameter in module.parameters())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        trainer.fit(module, datamodule=OneText(tokens))
    (visit,) = loop.visit_records
    row = {
        "train": train,
        "reason": visit["reason"] or "took part",
        "predicted_gib": visit["peak_bytes"] / GIB,
    }
    row["budget_gib"] = visit["budget_bytes"] / GIB
    if visit["reason"]:
        return row
    live = accumulate(
        event.nbytes()
        for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
        if event.name() == "[memory]"
    )
    return {
        **row,
        "allocator_gib": (weights + max(live)) / GIB,
        "resident_gib": (peak_bytes() - before) / GIB,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Print the rows and write them to ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=640, help="of the text")
    parser.add_argument("--json", type=Path, help="where the rows go as well")
    parser.add_argument(
        "--one", nargs=2, metavar=("FOLDER", "TRAIN"), help="the row of a way, or make the model: -"
    )
    options = parser.parse_args(argv)
    if options.one:
        folder, train = options.one
        if train == "-":
            save_model(folder)
        else:
            print(json.dumps(measure(folder, train, options.tokens)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for train in ("-", "backprop", "auto"):
            command = [sys.executable, __file__, "--one", folder, train, f"--tokens={options.tokens}"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
            if train != "-":
                rows.append(json.loads(done.stdout.splitlines()[-1]))
                print(rows[-1], flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
