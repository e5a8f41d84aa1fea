"""Gain or loss of a base in bf16 on this processor against one in fp32: seconds of a step, and where training ends.

A selector is trained on the pooled votes of the embedded world, once on a base in fp32 and once in bf16, step by step in
turns, so that a noisy machine disturbs both alike; both see the same batches and the same dropout. Adapters are fp32 in
either. A second, wider base with random weights tells how the time depends on the size.

* seconds: median of the steps of each; the ratio is the median of the pairs' ratios.
* loss, accuracy: on the held-out pairs of clients that took no part, after the last step.

On a processor with instructions for bf16, ``ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2`` in the environment shows
what one without them does.

Run: OMP_NUM_THREADS=1 python benchmarks/number_types.py [--steps 60] [--wide 512] [--json FILE]
"""

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedlight.datamodules.preferences.datamodule import PreferenceDataModule
from fedlight.datamodules.preferences.format import Format
from fedlight.datamodules.rows.split import Split
from fedlight.devices import hardware
from fedlight.modules.functional import choice_loss
from fedlight.modules.language.optimizers import Optimization
from fedlight.modules.selector import SelectorModule

TYPES = ("fp32", "bf16")


def make_data(options: argparse.Namespace) -> PreferenceDataModule:
    """The votes as ``conf/selector.yaml`` has them."""
    data = PreferenceDataModule(
        source=options.source,
        split=Split(test_source=options.test_source),
        view="selector",
        format=Format(choice_template="toy_choice", twins_together=True),
        tokenizer="toy",
        max_tokens=128,
        batch_size=options.batch,
    )
    data.prepare_data()
    data.setup("fit")
    data.setup("test")
    return data


def save_wide(folder: str, hidden: int) -> str:
    """A random Llama with the embedded world's tokenizer."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from fedlight.toy import MODEL

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=4,
        num_attention_heads=max(1, hidden // 64),
        **{name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")},
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def train(model: str, batches: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
    """A module in each number type after a step with each batch, and the seconds of its steps."""
    modules, optimizers, seconds = {}, {}, {name: list[float]() for name in TYPES}
    for name in TYPES:
        modules[name] = SelectorModule(
            model, dtype=name, lr=0.003, optimizer=Optimization(args={"betas": [0.9, 0.95]})
        )
        modules[name].configure_model()
        modules[name].train()
        optimizers[name] = modules[name].configure_optimizers()
    for number, batch in enumerate(batches):
        for name in TYPES:
            torch.manual_seed(number)  # the same dropout in both
            start = time.perf_counter()
            optimizers[name].zero_grad()
            modules[name].example_losses(batch).mean().backward()
            optimizers[name].step()
            seconds[name].append(time.perf_counter() - start)
    return {name: (modules[name], seconds[name][1:]) for name in TYPES}  # the first makes the moments


def score(module: SelectorModule, data: PreferenceDataModule) -> dict[str, float]:
    """Loss and accuracy on the held-out pairs."""
    module.eval()
    loss, right, rows = 0.0, 0, 0
    with torch.no_grad():
        for batch in data.test_dataloader():
            logits, labels = module.choice_logits(batch), batch["labels"]
            loss += choice_loss(logits, labels).double().sum().item()
            right += int((logits.argmax(dim=1) == labels).sum())
            rows += len(labels)
    return {"loss": loss / rows, "accuracy": right / rows}


def measure(model: str, data: PreferenceDataModule, steps: int, scored: bool) -> dict[str, dict[str, float]]:
    """Number type -> seconds of a step, their ratio to the first type's, and the scores."""
    batches: list[dict[str, Tensor]] = []
    while len(batches) < steps:
        batches += list(data.train_dataloader())
    found, rows = train(model, batches[:steps]), {}
    first = found[TYPES[0]][1]
    for name, (module, seconds) in found.items():
        ratio = statistics.median(own / other for own, other in zip(seconds, first, strict=True))
        rows[name] = {"seconds": statistics.median(seconds), "ratio": ratio}
        rows[name] |= score(module, data) if scored else {}
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table for each base."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--source", default="toy:votes")
    parser.add_argument("--test-source", default="toy:heldout")
    for name, value in (("steps", 60), ("wide_steps", 10), ("batch", 32), ("wide", 512)):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--json", type=Path, help="writes the figures to this file")
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")
    has = "with" if hardware.computes_bf16(torch.device("cpu")) else "without"
    level = torch.backends.cpu.get_cpu_capability()
    print(f"a processor {has} instructions for bf16 ({level}), {torch.get_num_threads()} threads")
    data, tables = make_data(options), {}
    with tempfile.TemporaryDirectory() as folder:
        for title, model, steps in (
            ("embedded model, hidden 96", "toy", options.steps),
            (f"random model, hidden {options.wide}", save_wide(folder, options.wide), options.wide_steps),
        ):
            tables[title] = measure(model, data, steps, scored=model == "toy")
            print(f"{title}, {steps} steps of {options.batch} sequences")
            for name, row in tables[title].items():
                figures = ", ".join(f"{key} {value:.4f}" for key, value in row.items())
                print(f"  {name}: {figures}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"bf16": has, "level": level, "bases": tables}, indent=1) + "\n")


if __name__ == "__main__":
    main()
