"""A FedBis round on a model as large as Qwen2-0.5B: seconds and peak memory for each form of the base, against the plan.

The model has the shape of Qwen2-0.5B (494 M parameters, tied embeddings of 151,936 tokens) and random weights, saved in
bf16; nothing is downloaded. A round has 4 clients with 2 steps of 2 sequences of 128 tokens each, LoRA of rank 8 on all
linear layers. Every form (plain fp32, plain bf16, int8, NF4, the last two with bf16 products) runs in a separate process.

* load, round: seconds of loading the base, and of the round through Lightning.
* peak: highest resident memory of the process (VmHWM) less that after the imports, in GiB.
* loading: the same up to the end of loading, before the first step.
* plan: the count of ``fedlight plan`` for a visit on a device with a base of 16, 8 or 4 bits; for fp32, base and activations
  are taken twice, because the plan has no device with 32 bits.

With ``--train forward`` clients train by forward passes alone, and with ``--tokens`` sequences have another length.

Run: python benchmarks/qwen_round.py [--forms fp32 bf16 int8 nf4] [--train forward] [--tokens N] [--json FILE]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fedlight.callbacks.loop.federated_loop import FederatedLoop
from fedlight.datamodules.federated.by_client import FederatedWrapper
from fedlight.devices.cost import CostMeter
from fedlight.devices.memory import (
    Footprint,
    Train,
    forward_only,
    moment_bytes_per_weight,
    resting_footprint,
)
from fedlight.devices.shape import BatchShape
from fedlight.federation.forward.zeroth_order import ZerothOrder
from fedlight.modules.language.adapters import Lora
from fedlight.modules.selector import SelectorModule

CLIENTS, STEPS, BATCH, TOKENS = 4, 2, 2, 128
SHAPE = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}
FORMS = {
    "fp32": ("plain", "fp32", 16),
    "bf16": ("plain", "bf16", 16),
    "int8": ("int8", "bf16", 8),
    "nf4": ("nf4", "bf16", 4),
}
"""Form -> base, dtype, bits of the plan's device."""
GIB = 2**30


def save_model(folder: str) -> None:
    """A random Qwen2 in bf16 with the embedded world's tokenizer, which is used for the choices' names alone."""
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    from fedlight.toy import MODEL

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    names = ("pad_token_id", "bos_token_id", "eos_token_id")
    config = Qwen2Config(
        **SHAPE, tie_word_embeddings=True, **{name: getattr(tokenizer, name) for name in names}
    )
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        Qwen2ForCausalLM(config).save_pretrained(folder)
    finally:
        torch.set_default_dtype(default)
    tokenizer.save_pretrained(folder)


class Votes(L.LightningDataModule):
    """Random votes: texts of equal length and which of two answers is better."""

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Batches of all clients' votes."""
        stream = torch.Generator().manual_seed(0)
        mask = torch.ones(TOKENS, dtype=torch.long)
        rows = [
            {
                "input_ids": torch.randint(5, SHAPE["vocab_size"], (TOKENS,), generator=stream),
                "attention_mask": mask,
                "labels": torch.tensor(number % 2),
            }
            for number in range(CLIENTS * STEPS * BATCH)
        ]
        return DataLoader(rows, batch_size=BATCH)


def count(module: SelectorModule, form: str, train: Train = "backprop") -> Footprint:
    """The plan's count for a visit of the round in whole batches."""
    bits, meter = FORMS[form][2], CostMeter(module)
    adamw = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    found = resting_footprint(meter.module, bits, moment_bytes_per_weight(adamw))
    shape = BatchShape(BATCH, TOKENS)
    if train == "forward":
        found, activations = forward_only(found), meter.forward_cost(shape).activation_bytes
    else:
        activations = meter.cost(shape).activation_bytes
    if form == "fp32":
        return replace(found, base_bytes=2 * found.base_bytes, activation_bytes=2 * activations)
    return replace(found, activation_bytes=activations)


def peak_bytes() -> int:
    """Highest resident memory of this process so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def measure(folder: str, form: str, train: Train = "backprop") -> dict[str, Any]:
    """A row of the table; the memory is that of this process."""
    import bitsandbytes  # noqa: F401
    import peft  # noqa: F401
    from transformers import Qwen2ForCausalLM  # noqa: F401

    base, dtype, _ = FORMS[form]
    torch.manual_seed(0)
    before = peak_bytes()
    module = SelectorModule(folder, base=base, dtype=dtype, lora=Lora(rank=8, dropout=0.0), lr=1e-4)
    start = time.perf_counter()
    module.configure_model()
    loaded, loading = time.perf_counter() - start, peak_bytes() - before
    forward = ZerothOrder() if train == "forward" else None
    loop = FederatedLoop(clients_per_round=CLIENTS, local_steps=STEPS, forward=forward)
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[loop],
    )
    own = STEPS * BATCH
    shares = {str(client): list(range(client * own, (client + 1) * own)) for client in range(CLIENTS)}
    start = time.perf_counter()
    trainer.fit(module, datamodule=FederatedWrapper(Votes(), lambda rows: shares))
    trained = time.perf_counter() - start
    if loop.rounds_done != 1:
        raise RuntimeError(f"{loop.rounds_done} rounds were trained, not one")
    peak, plan = peak_bytes() - before, count(module, form, train)
    return {
        "base": form,
        "load_seconds": loaded,
        "round_seconds": trained,
        "loading_gib": loading / GIB,
        "peak_gib": peak / GIB,
        "plan_gib": plan.peak_bytes / GIB,
        "plan_base_gib": plan.base_bytes / GIB,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    global TOKENS
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS), help="of the base")
    parser.add_argument(
        "--train", choices=["backprop", "forward"], default="backprop", help="how clients train"
    )
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a sequence")
    parser.add_argument("--json", type=Path, help="where the rows go as well")
    parser.add_argument(
        "--one", nargs=2, metavar=("FOLDER", "FORM"), help="the row of a form, or make the model: - "
    )
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    TOKENS = options.tokens
    if options.one:
        folder, form = options.one
        if form == "-":
            save_model(folder)
        else:
            print(json.dumps(measure(folder, form, options.train)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        _run(folder, "-", [])
        how = [f"--train={options.train}", f"--tokens={TOKENS}"]
        print(
            f"{CLIENTS} clients x {STEPS} steps x {BATCH} x {TOKENS} tokens, {torch.get_num_threads()} threads"
        )
        print("  base   load s   round s   loading GiB   peak GiB   plan GiB   of it base")
        for form in options.forms:
            row = json.loads(_run(folder, form, how).splitlines()[-1])
            rows.append(row)
            print(
                f"  {form:4}   {row['load_seconds']:6.1f}   {row['round_seconds']:7.1f}   {row['loading_gib']:11.2f}"
                f"   {row['peak_gib']:8.2f}   {row['plan_gib']:8.2f}   {row['plan_base_gib']:10.2f}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


def _run(folder: str, form: str, how: Sequence[str]) -> str:
    command = [sys.executable, __file__, "--one", folder, form, *how]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{found.stderr}")
    return found.stdout


if __name__ == "__main__":
    main()
