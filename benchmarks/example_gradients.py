"""Cost of the gradient of each example: a loop over the examples against the two ways that take a batch at once.

LESS (M. Xia et al., ICML 2024, https://arxiv.org/abs/2402.04333) takes the LoRA gradient of every public row by itself.
Measured here on a random Llama, in one run; the ways alternate, so that a noisy machine
disturbs all alike:

* seconds per example: median over the repetitions; of ``training``, one backward pass for the mean of the batch.
* MiB: rise of a process's peak memory in the step, measured in a separate process for each way.
* error: largest difference to the loop, relative to the largest gradient.
* projection: the same for making the features out of the gradients.

Texts are of lengths between a half and the whole of --tokens, as sorted rows would be nearly equal, and padded.

Run: OMP_NUM_THREADS=1 python benchmarks/example_gradients.py [--tokens 64 256] [--json FILE]
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedlight.augmentation.less.example_gradients import Gradients, example_gradients
from fedlight.augmentation.less.features import RandomProjection
from fedlight.modules.language.adapters import Lora, trained_parameters
from fedlight.modules.sft import SFTModule

WAYS = ("loop", "func", "layers", "training")


def save_model(folder: str, options: argparse.Namespace) -> None:
    """A random Llama with the embedded world's tokenizer, which is not used."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from fedlight.toy import MODEL

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    heads = max(1, options.hidden // 64)
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 8 // 3,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=4096,
        **{name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")},
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_module(folder: str, options: argparse.Namespace) -> SFTModule:
    """With an adapter whose B is not 0, as after a warm-up."""
    module = SFTModule(folder, base=options.base, lora=Lora(rank=options.rank, dropout=0), dtype="fp32")
    module.configure_model()
    stream = torch.Generator().manual_seed(0)
    for name, weight in trained_parameters(module).items():
        if "lora_B" in name:
            weight.data.normal_(0, 0.02, generator=stream)
    return module.eval()


def make_batch(tokens: int, options: argparse.Namespace) -> dict[str, Tensor]:
    """Texts of half to all of the tokens; the last quarter is the response."""
    stream = torch.Generator().manual_seed(tokens)
    lengths = torch.randint(tokens // 2, tokens + 1, (options.batch,), generator=stream)
    lengths[0] = tokens
    ids = torch.randint(5, options.vocabulary, (options.batch, tokens), generator=stream)
    place = torch.arange(tokens)[None]
    mask = (place < lengths[:, None]).long()
    labels = torch.where((place >= lengths[:, None] * 3 // 4) & (mask == 1), ids, -100)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


def loop(module: SFTModule, batch: dict[str, Tensor]) -> Gradients:
    """One backward pass for each example, cut to its length."""
    weights, rows = trained_parameters(module), []
    for row, length in enumerate(batch["attention_mask"].sum(dim=1)):
        one = {name: part[row : row + 1, :length] for name, part in batch.items()}
        rows.append(torch.autograd.grad(module.example_losses(one).sum(), list(weights.values())))
    return {name: torch.stack(parts) for name, *parts in zip(weights, *rows, strict=True)}


def take(way: str, module: SFTModule, batch: dict[str, Tensor]) -> Gradients:
    """The gradients by one of the ways; of ``training`` none, but as long as they take."""
    if way == "loop":
        return loop(module, batch)
    if way == "training":
        torch.autograd.grad(module.example_losses(batch).mean(), list(trained_parameters(module).values()))
        return {}
    return example_gradients(module, batch, way)


def seconds_of(step: Callable[[], object]) -> float:
    """Of one call."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def peak_mib(way: str, folder: str, tokens: int, options: argparse.Namespace) -> float:
    """By how much the peak of this process rises in a step; of use in a process that has done nothing before."""
    torch.set_num_threads(1)
    module = make_module(folder, options)
    small = argparse.Namespace(**{**vars(options), "batch": 1})
    take(way, module, make_batch(8, small))  # loading and compiling at the first call are no part of a step
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
    before = _peak_kib()
    take(way, module, make_batch(tokens, options))
    return (_peak_kib() - before) / 1024


def _peak_kib() -> int:
    """Most memory that this process has held, on Linux; getrusage counts the parent's, too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def measure(folder: str, tokens: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per way."""
    module, batch = make_module(folder, options), make_batch(tokens, options)
    ways = [way for way in WAYS if way != "func" or options.base == "plain"]
    found = {way: take(way, module, batch) for way in ways}
    expected = found["loop"]
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    sizes = {name: gradient[0].numel() for name, gradient in expected.items()}
    project = RandomProjection(sizes, options.dimension, seed=0)
    steps: dict[str, Callable[[], object]] = {
        way: (lambda way=way: take(way, module, batch)) for way in ways
    } | {"projection": lambda: project(expected)}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.repeats):
        for name, step in steps.items():
            times[name].append(seconds_of(step) / options.batch)
    rows = []
    for name in steps:
        gradients = found.get(name) or {}
        errors = [
            float((gradient - expected[key]).abs().max()) / largest for key, gradient in gradients.items()
        ]
        row: dict[str, Any] = {"tokens": tokens, "way": name, "seconds": statistics.median(times[name])}
        row["error"] = max(errors) if errors else None
        row["peak_mib"] = None if name == "projection" else _elsewhere(name, folder, tokens, options)
        rows.append(row | {"weights": sum(sizes.values())})
    return rows


def _elsewhere(way: str, folder: str, tokens: int, options: argparse.Namespace) -> float:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(peak_mib, (way, folder, tokens, options))


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """The rows of one length of texts; in brackets how many times faster than the loop."""
    print(f"{rows[0]['tokens']} tokens, {rows[0]['weights']:,} weights")
    print(f"  {'way':12}{'ms per example':>16}{'':9}{'MiB':>8}{'error':>10}")
    for row in rows:
        faster = f"({rows[0]['seconds'] / row['seconds']:.1f} x)"
        mib = "" if row["peak_mib"] is None else f"{row['peak_mib']:.0f}"
        error = "" if row["error"] is None else f"{row['error']:.0e}"
        print(f"  {row['way']:12}{1000 * row['seconds']:16.2f}{faster:>9}{mib:>8}{error:>10}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table for each length of texts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--base", default="plain", help="plain, int8 or nf4; func takes plain alone")
    sizes = {"batch": 16, "repeats": 7, "hidden": 128, "layers": 4, "rank": 16, "dimension": 8192}
    for name, value in (sizes | {"vocabulary": 8000}).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", type=Path, help="writes the figures to this file")
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")
    model = (
        f"Llama, hidden {options.hidden}, {options.layers} layers, base {options.base}, LoRA r {options.rank}"
    )
    print(f"{model}; batches of {options.batch}, {torch.get_num_threads()} threads")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, options)
        for tokens in options.tokens:
            found = measure(folder, tokens, options)
            print_table(found)
            rows += found
    if options.json:
        options.json.write_text(json.dumps({"model": model, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
