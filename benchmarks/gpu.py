"""Client visits a second on a GPU: a model as large as Qwen2-0.5B, several clients in one batch.

The model has the shape of Qwen2-0.5B and random weights in bf16, made here; nothing is downloaded. A round has 32 clients
with 10 steps of 4 sequences of 256 tokens each, with labels for the second half; LoRA of rank 8 on all linear layers,
AdamW, no dropout. Each number of clients at once has a separate run, one after the other; a line names those too large.

* visits: client visits a second, median of the rounds after the first.
* mfu: share of the card's dense bf16 peak, by the operations of a visit as ``fedlight plan`` counts them.
* peak: highest memory of torch's allocator, in GiB.
* speed: visits over those of one client at a time.
* difference: largest difference of the trained adapter to that of one client at a time, over the largest weight.

At the end the tests marked ``gpu`` run; some need bitsandbytes. For all else a Python with torch, lightning,
omegaconf, peft, transformers and pytest is enough, also without an installed fedlight:
``PYTHONPATH=. python3 benchmarks/gpu.py --json FILE``, estimated to take less than eight minutes on an H100; no time was
measured. ``--tiny`` is the same at a size for any processor.

Run: python benchmarks/gpu.py [--at-once 1 4 8 16 32] [--precision 32-true] [--tiny] [--json FILE]
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fedlight.callbacks.loop.federated_loop import FederatedLoop
from fedlight.datamodules.federated.by_client import FederatedWrapper
from fedlight.devices.cost import CostMeter
from fedlight.devices.shape import BatchShape
from fedlight.modules.language.adapters import Lora
from fedlight.modules.sft import SFTModule

ROOT = Path(__file__).resolve().parents[1]
PEAK_TFLOPS = {"H200": 989, "H100": 989, "A100": 312, "L40S": 362, "L4": 121, "4090": 165, "A10": 125}
"""Part of a card's name -> its dense bf16 operations, in 10^12 a second; the first that fits."""
GIB = 2**30


@dataclass(frozen=True)
class Workload:
    """Trained model and batches.

    Args:
        shape: of the model, as ``Qwen2Config`` has it.
        dtype: of its weights.
        clients, steps, batch, tokens: of a round.
        rounds: after the first.
        at_once: numbers of clients that are trained side by side.
    """

    shape: dict[str, int]
    dtype: str = "bf16"
    clients: int = 32
    steps: int = 10
    batch: int = 4
    tokens: int = 256
    rounds: int = 2
    at_once: tuple[int, ...] = (1, 4, 8, 16, 32)


QWEN = Workload(
    {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    }
)
TINY = Workload(
    {
        "vocab_size": 600,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    dtype="fp32",
    clients=4,
    steps=2,
    batch=2,
    tokens=16,
    rounds=1,
    at_once=(1, 2, 4),
)


def save_model(folder: str, shape: dict[str, int]) -> None:
    """A random Qwen2 in bf16 with the embedded world's tokenizer."""
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "fedlight/toy/model")
    names = ("pad_token_id", "bos_token_id", "eos_token_id")
    config = Qwen2Config(
        **shape, tie_word_embeddings=True, **{name: getattr(tokenizer, name) for name in names}
    )
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):  # a second instead of ten
        model = Qwen2ForCausalLM(config)
    model.to("cpu", torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class Texts(L.LightningDataModule):
    """Random texts of equal length, whose second half has labels."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.work = work

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Batches of all clients' texts."""
        work, stream = self.work, torch.Generator().manual_seed(0)
        size = (work.clients * work.steps * work.batch, work.tokens)
        ids = torch.randint(5, work.shape["vocab_size"], size, generator=stream)
        mask = torch.ones(work.tokens, dtype=torch.long)
        labels = torch.where(torch.arange(work.tokens) < work.tokens // 2, -100, ids)
        rows = [
            {"input_ids": a, "attention_mask": mask, "labels": b} for a, b in zip(ids, labels, strict=True)
        ]
        return DataLoader(rows, batch_size=work.batch)  # type: ignore[arg-type]


class Clock(L.Callback):
    """Seconds of each round after the first, from one beginning to the next."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """A round ends and the next begins."""
        self._take(trainer.current_epoch)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The last one ends."""
        self._take(trainer.current_epoch)

    def _take(self, epoch: int) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if epoch > 1:
            self.seconds.append(now - self._start)
        self._start = now


def train(
    folder: str, work: Workload, at_once: int, precision: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A row of the table without what follows from the others, and the trained adapter."""
    torch.manual_seed(0)
    module = SFTModule(folder, dtype=work.dtype, lora=Lora(rank=8, dropout=0.0), lr=1e-4)
    clock, own = Clock(), work.steps * work.batch
    shares = {str(n): list(range(n * own, (n + 1) * own)) for n in range(work.clients)}
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    trainer = L.Trainer(
        max_epochs=work.rounds + 1,
        accelerator="auto",
        devices=1,
        precision=precision,  # type: ignore[arg-type]
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            FederatedLoop(clients_per_round=work.clients, local_steps=work.steps, clients_at_once=at_once),
            clock,
        ],
    )
    trainer.fit(module, datamodule=FederatedWrapper(Texts(work), lambda rows: shares))
    row: dict[str, Any] = {
        "at_once": at_once,
        "visits": work.clients / statistics.median(clock.seconds),
        "low": work.clients / max(clock.seconds),
        "high": work.clients / min(clock.seconds),
    }
    if torch.cuda.is_available():
        row["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
    return row, {name: weight.cpu() for name, weight in module.state_dict().items()}


def visit_flops(folder: str, work: Workload) -> int:
    """Operations of a visit."""
    meter = CostMeter(SFTModule(folder, dtype=work.dtype, lora=Lora(rank=8, dropout=0.0)))
    labelled = work.batch * (work.tokens - work.tokens // 2)
    return work.steps * meter.cost(BatchShape(work.batch, work.tokens, labelled)).flops


def peak_tflops() -> float | None:
    """Peak of this machine's card, None where it is not known."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((float(peak) for part, peak in PEAK_TFLOPS.items() if part in name), None)


def measure(folder: str, work: Workload, precision: str) -> list[dict[str, Any]]:
    """The rows, printed as they come."""
    flops, peak = visit_flops(folder, work), peak_tflops()
    print(f"a visit: {flops / 1e12:.3g} TFLOP; {work}")
    print("  at once   visits/s (low to high)   speed     MFU   peak GiB   difference", flush=True)
    rows: list[dict[str, Any]] = []
    first: dict[str, Tensor] = {}
    for at_once in work.at_once:
        try:
            row, state = train(folder, work, at_once, precision)
        except torch.OutOfMemoryError as error:
            print(f"  {at_once:7}   out of memory: {str(error).splitlines()[0]}", flush=True)
            rows.append({"at_once": at_once, "error": "out of memory"})
        else:
            row["flops"] = flops
            if peak:
                row["mfu"] = flops * row["visits"] / (peak * 1e12)
            if not first and at_once == 1:
                first = state
            if first:
                row["speed"] = row["visits"] / rows[0]["visits"] if rows else 1.0
                largest = max(float(weight.abs().max()) for weight in first.values())
                row["difference"] = max(float((state[n] - first[n]).abs().max()) for n in first) / largest
            rows.append(row)
            print(_line(row), flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return rows


def _line(row: dict[str, Any]) -> str:
    cells = [f"  {row['at_once']:7}   {row['visits']:8.2f} ({row['low']:.2f} to {row['high']:.2f})"]
    cells += [
        f"{row[name]:{form}}" if name in row else "-" for name, form in (("speed", "7.2f"), ("mfu", "7.1%"))
    ]
    cells += [
        f"{row[name]:{form}}" if name in row else "-"
        for name, form in (("peak_gib", "8.1f"), ("difference", ".1e"))
    ]
    return "   ".join(cells)


def run_gpu_tests(seconds: float) -> str:
    """The last line of the tests that are marked ``gpu``."""
    files = [
        str(f)
        for f in sorted((ROOT / "tests").rglob("test_*.py"))
        if "mark.gpu" in f.read_text(encoding="utf-8")
    ]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-q",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore",
        *files,
    ]
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return f"not done within {seconds:.0f} seconds"
    lines = found.stdout.splitlines()
    print("\n".join(lines[-40:]))
    return lines[-1] if lines else found.stderr[-500:]


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--at-once", type=int, nargs="+", help="numbers of clients that are trained side by side"
    )
    parser.add_argument("--precision", default="32-true", help="of the trainer; the base is bf16 in any")
    parser.add_argument("--tiny", action="store_true", help="a size for any processor")
    parser.add_argument("--json", type=Path, help="where the rows go as well")
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    torch.set_float32_matmul_precision("high")  # products of the fp32 adapters
    work = TINY if options.tiny else QWEN
    if options.at_once:
        work = Workload(**{**vars(work), "at_once": tuple(options.at_once)})
    if not options.tiny and not torch.cuda.is_available():
        sys.exit("gpu: there is no CUDA device here: add --tiny")
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print(f"{card}, torch {torch.__version__}, precision {options.precision}")
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, work.shape)
        found: dict[str, Any] = {"card": card, "rows": measure(folder, work, options.precision)}
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if torch.cuda.is_available():
        found["gpu_tests"] = run_gpu_tests(seconds=120)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
