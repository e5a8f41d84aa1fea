"""Peak of memory of trainings, each in a fresh process, compared with the forecast of a dry run.

Each case trains LoRA of rank 8 on all linear layers for some steps, on equal batches of random tokens, all of them labelled.
The forecast counts such batches too. Its peak is the most memory that the process
occupied (``ru_maxrss``), imports and loading included. Of the quantized bases the rest is in fp32.

Run: OMP_NUM_THREADS=1 python benchmarks/memory_forecast.py [--models smollm2-135m-instruct gemma-3-270m]
     [--bases fp32 bf16 nf4 int8] [--shapes 2x64 4x128 1x512] [--checkpointing] [--json FILE]
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MODELS = ("smollm2-135m-instruct", "gemma-3-270m")
BASES = {
    "fp32": ("plain", "fp32"),
    "bf16": ("plain", "bf16"),
    "nf4": ("nf4", "fp32"),
    "int8": ("int8", "fp32"),
}
STEPS = 4


def train(model: str, settings: dict[str, Any], examples: int, tokens: int) -> float:
    """GB at the peak of this process, after some steps."""
    import lightning as L
    import torch
    from torch.utils.data import DataLoader

    from fedlight.callbacks.loop.federated_loop import FederatedLoop  # noqa: F401 - a fit imports it
    from fedlight.modules.sft import SFTModule

    warnings.simplefilter("ignore")
    ids = torch.randint(5, 1000, (STEPS * examples, tokens), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, 0] = -100
    rows = [
        {"input_ids": one, "attention_mask": torch.ones_like(one), "labels": own}
        for one, own in zip(ids, labels, strict=True)
    ]
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(max_epochs=1, accelerator="cpu", default_root_dir=folder, **quiet)
        trainer.fit(SFTModule(model, **settings), DataLoader(rows, batch_size=examples))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def forecast(model: str, settings: dict[str, Any], examples: int, tokens: int) -> float:
    """Forecast of the peak, in GB, by a dry run."""
    from fedlight.lightning_cli.cli import ReadSettings, find_config
    from fedlight.preflight.memory import count_training

    data = {"batch_size": examples, "max_tokens": tokens}
    arguments = [f"--model.{key}={value}" for key, value in {"model": model, **settings}.items()]
    arguments += [f"--data.{key}={value}" for key, value in data.items()]
    config = ReadSettings(["fit", "--config", find_config("sft.yaml"), *arguments]).config["fit"]
    return count_training("fit", config, model, {}).peak_bytes / 1e9


def measure(model: str, base: str, shape: str, checkpointing: bool) -> dict[str, float]:
    """Peak and forecast of a case in GB; the training runs in a fresh process."""
    form, dtype = BASES[base]
    settings = {"base": form, "dtype": dtype} | ({"gradient_checkpointing": True} if checkpointing else {})
    size = dict(zip(("examples", "tokens"), map(int, shape.split("x")), strict=True))
    case = json.dumps({"model": model, "settings": settings, **size})
    command = [sys.executable, __file__, "--case", case]
    done = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE)
    peak, said = float(done.stdout.splitlines()[-1]), forecast(model, settings, **size)
    print(
        f"{model} {base:4} {shape:6} peak {peak:.2f} GB, forecast {said:.2f} GB, {said / peak:.2f}",
        flush=True,
    )
    return {f"peak_gb_{shape}": peak, f"forecast_gb_{shape}": said}


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--bases", nargs="+", default=list(BASES), choices=BASES)
    parser.add_argument("--shapes", nargs="+", default=["2x64", "4x128", "1x512"], help="examples x tokens")
    parser.add_argument("--checkpointing", action="store_true", help="activations are computed twice")
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="where the rows go as well")
    options = parser.parse_args(argv)
    if options.case:
        print(train(**options.case))
        return
    rows: list[dict[str, Any]] = []
    for model in options.models:
        for base in options.bases:
            rows.append({"case": f"{model}, {base}"})
            for shape in options.shapes:
                rows[-1] |= measure(model, base, shape, options.checkpointing)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
