"""Predicted against measured time of visits on this machine, as if it were a device of the emulator.

A case is a number of threads, a number form of the frozen base (fp32, bf16, int8, NF4), a width of the model and a shape of
the batches. Its visit is trained like a client's, with LoRA of rank 8 and AdamW, a step at a time; the first step is not
counted. The emulator predicts seconds = operations / (peak x utilisation). The peak is the fastest product of matrices on as
many threads (``fedlight device measure``). Utilisation is fitted on every second case, in the order of their names: the
geometric mean of the shares that these reached. It is tested on the others:

* device: one utilisation for a number of threads, like a profile's, whatever the form of the base.
* form: one for a number of threads and a form of the base.

It needs a machine without other work, and first says about how long it will take; ``--plan`` says only that. int8 and NF4
need bitsandbytes; without it a line says that they are left out.

Run: python benchmarks/device_calibration.py [--threads 1 2] [--steps 10] [--plan] [--tiny] [--json FILE]
"""

import argparse
import gc
import json
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from edge_devices import halves
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fedlight.devices.cost import CostMeter
from fedlight.devices.measure.trial import measure_products
from fedlight.devices.quantization import QuantizedBase
from fedlight.devices.shape import BatchShape
from fedlight.modules.language.adapters import Lora
from fedlight.modules.sft import SFTModule
from fedlight.support.words import in_largest_unit

ROOT = Path(__file__).resolve().parents[1]
FORMS = {"fp32": ("fp32", 16), "bf16": ("bf16", 16), "int8": ("fp32", 8), "nf4": ("fp32", 4)}
"""Form of the base -> number type in which it is loaded, and bits that are then put under the adapter."""
GUESSED_UTILISATION = 0.2
"""Of the estimate of how long the measurement takes."""


@dataclass(frozen=True)
class Work:
    """Trained models: of the shape of Qwen2 with random weights, and (examples, tokens) of batches."""

    widths: tuple[int, ...] = (256, 512)
    layers: int = 8
    words: int = 8192
    batches: tuple[tuple[int, int], ...] = ((1, 64), (1, 256), (4, 64), (4, 256), (8, 128))
    matrix: int = 1024


TINY = Work(widths=(32,), layers=2, words=600, batches=((1, 8), (2, 8), (2, 16)), matrix=64)


@dataclass(frozen=True)
class Case:
    """One visit; its name orders the cases."""

    threads: int
    form: str
    width: int
    examples: int
    tokens: int

    @property
    def name(self) -> str:
        """Name such as ``1/bf16/256/4x064``."""
        return f"{self.threads}/{self.form}/{self.width}/{self.examples}x{self.tokens:03}"


@dataclass(frozen=True)
class Row:
    """Measured case: FLOPs of a step, and its median seconds, measured and predicted in two ways."""

    case: Case
    fitted: bool
    flops: int
    seconds: float
    by_device: float
    by_form: float


def cases(work: Work, threads: Sequence[int], forms: Sequence[str]) -> list[Case]:
    """Return all cases, sorted by name."""
    found = [Case(*key, *batch) for *key, batch in product(threads, forms, work.widths, work.batches)]
    return sorted(found, key=lambda case: case.name)


def save_model(folder: Path, width: int, work: Work) -> str:
    """Write a random Qwen2 of that width with the embedded world's tokenizer; return its folder."""
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "fedlight/toy/model")
    names = ("pad_token_id", "bos_token_id", "eos_token_id")
    config = Qwen2Config(
        vocab_size=work.words,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=work.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        **{name: getattr(tokenizer, name) for name in names},
    )
    torch.manual_seed(0)
    place = folder / f"width_{width}"
    Qwen2ForCausalLM(config).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return str(place)


def load(model: str, form: str) -> SFTModule:
    """Return the module with its base in that form."""
    dtype, bits = FORMS[form]
    module = SFTModule(model, dtype=dtype, lora=Lora(rank=8, dropout=0.0), lr=1e-4)
    module.configure_model()
    if bits != 16:
        QuantizedBase(module).use(bits)
    return module


def make_batch(case: Case, words: int) -> dict[str, Tensor]:
    """Return random texts without padding, with a label for each token."""
    stream = torch.Generator().manual_seed(0)
    ids = torch.randint(5, words, (case.examples, case.tokens), generator=stream)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def step_flops(meter: CostMeter, case: Case) -> int:
    """Return the operations of a step by the emulator's count."""
    return meter.cost(BatchShape(case.examples, case.tokens, case.examples * (case.tokens - 1))).flops


def time_visit(module: SFTModule, batch: dict[str, Tensor], steps: int) -> float:
    """Return the median seconds of a step of a visit, after one that is not counted."""
    optimizer = torch.optim.AdamW([weight for weight in module.parameters() if weight.requires_grad], lr=1e-4)
    module.train()
    seconds = []
    for number in range(steps + 1):
        start = time.perf_counter()
        optimizer.zero_grad()
        module.example_losses(batch).mean().backward()
        optimizer.step()
        if number:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Compute on so many threads of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def predict(
    measured: Sequence[tuple[Case, int, float]], peaks: dict[int, float]
) -> tuple[list[Row], dict[str, float]]:
    """Return the rows and name of a group -> fitted utilisation.

    Args:
        measured: case, FLOPs of a step, seconds of a step; sorted by name.
        peaks: threads -> operations a second.

    Raises:
        ValueError: a group has no case for the fit.
    """
    fitted = halves(case.name for case, _, _ in measured)
    groups: tuple[Callable[[Case], str], ...] = (
        lambda case: f"threads={case.threads}",
        lambda case: f"threads={case.threads}, {case.form}",
    )
    found: dict[str, float] = {}
    for group in groups:
        for name in {group(case): None for case, _, _ in measured}:
            shares = [
                math.log(flops / seconds / peaks[case.threads])
                for case, flops, seconds in measured
                if group(case) == name and fitted[case.name]
            ]
            if not shares:
                raise ValueError(
                    f"{name}: there is no case on which to fit its utilisation; take more batches"
                )
            found[name] = math.exp(statistics.fmean(shares))
    rows = []
    for case, flops, seconds in measured:
        ways = [flops / (peaks[case.threads] * found[group(case)]) for group in groups]
        rows.append(Row(case, fitted[case.name], flops, seconds, *ways))
    return rows, found


def summary(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return way -> median and largest relative error of the tested half, and how many are within 20 %."""
    found = {}
    for way in ("by_device", "by_form"):
        errors = [abs(getattr(row, way) / row.seconds - 1) for row in rows if not row.fitted]
        close = sum(one <= 0.2 for one in errors)
        found[way] = {
            "cases": len(errors),
            "within_goal": close,
            "median": statistics.median(errors),
            "largest": max(errors),
        }
    return found


def show(rows: Sequence[Row], found: dict[str, float], peaks: dict[int, float]) -> None:
    """Print the table and the errors."""
    console = Console()
    console = console if console.is_terminal else Console(width=140)
    table = Table(title="A step: milliseconds measured, predicted, error")
    for name in ("threads/form/width/batch", "half", "GFLOP", "measured", "by device", "", "by form", ""):
        table.add_column(name, justify="left" if name in ("threads/form/width/batch", "half") else "right")
    for row in rows:
        cells = [f"{row.flops / 1e9:.2f}", f"{1e3 * row.seconds:.1f}"]
        for predicted in (row.by_device, row.by_form):
            cells += [f"{1e3 * predicted:.1f}", f"{predicted / row.seconds - 1:+.1%}"]
        table.add_row(row.case.name, "fitted" if row.fitted else "tested", *cells)
    console.print(table)
    for threads, peak in peaks.items():
        console.print(f"peak of threads={threads}: {peak / 1e9:.1f} GFLOPS", highlight=False)
    for name, share in found.items():
        console.print(f"utilisation of {name}: {share:.3f}", highlight=False)
    for way, one in summary(rows).items():
        console.print(
            f"{way}: {one['within_goal']} of {one['cases']} within 20%; error {one['median']:.1%} in the median, "
            f"{one['largest']:.1%} at most",
            highlight=False,
        )


def usable_forms() -> list[str]:
    """Return the forms that can be computed here."""
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        print("int8 and NF4 are left out: bitsandbytes is not installed")
        return ["fp32", "bf16"]
    return list(FORMS)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print predictions and errors."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="numbers of threads of torch")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a visit")
    parser.add_argument("--plan", action="store_true", help="say only how long it will take")
    parser.add_argument("--tiny", action="store_true", help="models of no use, in seconds")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    work = TINY if options.tiny else Work()
    todo = cases(work, options.threads, usable_forms())
    with tempfile.TemporaryDirectory() as folder:
        models = {width: save_model(Path(folder), width, work) for width in work.widths}
        meters = {
            width: CostMeter(SFTModule(model, lora=Lora(rank=8, dropout=0.0)))
            for width, model in models.items()
        }
        flops = {case: step_flops(meters[case.width], case) for case in todo}
        peaks = {}
        for threads in options.threads:
            with on_threads(threads):
                peaks[threads] = max(
                    measure_products(work.matrix, torch.device("cpu"), 0.01 if options.tiny else 3).values()
                )
        speed = {case: peaks[case.threads] * GUESSED_UTILISATION for case in todo}
        guess = sum((options.steps + 1) * flops[case] / speed[case] for case in todo)
        print(f"{len(todo)} visits of {options.steps} steps: about {in_largest_unit(guess)}", flush=True)
        if options.plan:
            return
        measured = []
        for case in todo:
            with on_threads(case.threads):
                module = load(models[case.width], case.form)
                measured.append(
                    (case, flops[case], time_visit(module, make_batch(case, work.words), options.steps))
                )
            del module
            gc.collect()
    rows, found = predict(measured, peaks)
    show(rows, found, peaks)
    if options.json:
        content: dict[str, Any] = {
            "rows": [asdict(row) for row in rows],
            "utilisation": found,
            "errors": summary(rows),
        }
        options.json.write_text(json.dumps({**content, "peaks": peaks}, indent=1) + "\n")


if __name__ == "__main__":
    main()
