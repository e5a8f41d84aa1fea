"""Training steps a second of fedlight's modules and of TRL's trainers: one workload, by turns in one run, no federation.

A Llama of a million parameters with random weights, or the language model in the folder ``--model``, and LoRA of rank 8 on
all linear layers, without dropout; random prompts and responses of equal length in a fixed order; fused AdamW at a constant
rate, no clipping; fp32, or a base in bf16, which TRL trains under autocast, its default. Nothing is logged, evaluated or
saved; each side collates tokens in its own way. Both start from the same adapter. The run ends with an error where the mean
losses of a round differ by more than ``--tolerance``: then they train unlike things.

* steps: median training steps a second of a way's rounds; a round is one epoch of the data.
* ratio: median over the rounds of fedlight's speed to TRL's in the same turn; low and high are its extremes.
* dpo: both compute the reference in each step; fedlight's is told to forget it.

TRL, https://github.com/huggingface/trl, runs in a separate environment, where trl, accelerate, torch, transformers, peft
and datasets can be imported: ``--trl`` names a Python there.

Run: python benchmarks/trl_trainers.py --trl PYTHON [--rounds 7] [--only sft ...] [--json FILE]
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers import make_model, measure
from peers_ways import VOCABULARY, Settings, Turns
from shown_rows import show
from torch import Tensor, nn

RATES = {"sft": 1e-3, "reward": 1e-4, "dpo": 1e-4}
"""Task -> learning rate."""
BETA = 0.1
SIDES = ("chosen", "rejected")
COLUMNS = ("task", "size", "steps", "trl_steps", "ratio", "low", "high", "first_loss", "last_loss", "apart")
Row = dict[str, Any]


def draw_pairs(settings: Settings, size: list[int]) -> list[Row]:
    """Return rows with ``prompt_ids``, ``chosen_ids`` and ``rejected_ids``, each half as long as a text."""
    shape, stream = (settings.steps * size[0], 3, size[1] // 2), torch.Generator().manual_seed(0)
    drawn = torch.randint(5, VOCABULARY, shape, generator=stream).tolist()
    return [dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), row, strict=True)) for row in drawn]


def set_start(model: nn.Module) -> None:
    """Give the trained weights the same values on both sides: A and a head drawn, B 0; in fp32."""
    stream = torch.Generator().manual_seed(1)
    for name, weight in sorted(model.named_parameters()):
        if weight.requires_grad:
            drawn = torch.randn(weight.shape, generator=stream) * 0.1
            # replaced, not copied into: PEFT's head is as narrow as the base
            weight.data = torch.zeros_like(drawn) if "lora_B" in name else drawn


def save_losses(settings: Settings, way: str, size: list[int], losses: list[Tensor]) -> None:
    """Write the mean loss of each round."""
    means = torch.stack(losses).view(-1, settings.steps).mean(dim=1)
    loss_file(settings, way, "x".join(map(str, size))).write_text(json.dumps(means.tolist()))


def loss_file(settings: Settings, way: str, size: str) -> Path:
    """Return the file with a way's mean losses."""
    return Path(settings.folder).parent / f"{way}, {size}.json"


def train_own(task: str, settings: Settings, size: list[int], turns: Turns) -> None:
    """Train a module of fedlight in Lightning's trainer, on the batches of fedlight's data modules."""
    import lightning as L
    from torch.utils.data import DataLoader

    from fedlight import DPOModule, RewardModule, SFTModule
    from fedlight.datamodules.text.examples import collate_preferred, collate_responses
    from fedlight.modules.language.adapters import Lora
    from fedlight.modules.language.optimizers import Optimization

    losses = list[Tensor]()
    options: dict[str, Any] = {"optimizer": Optimization("AdamW", {"weight_decay": 0.0})}
    options |= {"lr": RATES[task], "lora": Lora(rank=8, alpha=16, dropout=0.0), "dtype": settings.dtype}
    kinds: dict[str, Any] = {"sft": SFTModule, "reward": RewardModule}
    module = kinds.get(task, partial(DPOModule, beta=BETA))(settings.folder, **options)
    module.configure_model()
    set_start(module.network)

    def respond(row: Row, side: str) -> Any:
        prompt, answer = row["prompt_ids"], row[f"{side}_ids"]
        return {"ids": np.array(prompt + answer), "prompt_length": len(prompt)}

    rows: list[Any] = draw_pairs(settings, size)
    if task == "sft":
        collate, rows = collate_responses, [respond(row, "chosen") for row in rows]
    else:
        collate = collate_preferred
        rows = [{side: respond(row, side) for side in SIDES} | {"index": n} for n, row in enumerate(rows)]

    class Rounds(L.Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            turns.next_round()

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if task == "dpo":
                module._reference.clear()

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *rest: Any) -> None:
            losses.append(outputs["loss"].detach())

        def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            turns.stop()

    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = L.Trainer(
        max_epochs=settings.rounds + 1, accelerator="cpu", callbacks=[Rounds()], **dict.fromkeys(off, False)
    )
    trainer.fit(module, DataLoader(rows, batch_size=size[0], collate_fn=partial(collate, padding=0)))
    save_losses(settings, f"fedlight: {task}", size, losses)


def train_trl(task: str, settings: Settings, size: list[int], turns: Turns) -> None:
    """Train with one of TRL's trainers."""
    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM as Causal
    from transformers import AutoModelForSequenceClassification as Classifier
    from transformers import AutoTokenizer, TrainerCallback

    losses, rows = list[Tensor](), draw_pairs(settings, size)
    parent, config, loader = trl.DPOTrainer, trl.DPOConfig, Causal.from_pretrained
    own: dict[str, Any] = {"beta": BETA}
    if task == "sft":
        parent, config, own = trl.SFTTrainer, trl.SFTConfig, {}
        for row in rows:
            prompt, answer = row.pop("prompt_ids"), row.pop("chosen_ids")
            row |= {"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer}
    elif task == "reward":
        parent, config, own = trl.RewardTrainer, trl.RewardConfig, {}
        loader = partial(Classifier.from_pretrained, num_labels=1)
        for row in rows:
            row |= {f"{side}_ids": row["prompt_ids"] + row[f"{side}_ids"] for side in SIDES}

    class Trainer(parent):  # type: ignore[misc, valid-type]
        def _prepare_dataset(self, dataset: Any, *rest: Any, **options: Any) -> Any:
            return dataset  # it has tokens already

        def training_step(self, *given: Any, **options: Any) -> Any:
            loss = super().training_step(*given, **options)
            losses.append(loss.detach())
            return loss

    class Rounds(TrainerCallback):
        def on_epoch_begin(self, *given: Any, **options: Any) -> None:
            turns.next_round()

        def on_train_end(self, *given: Any, **options: Any) -> None:
            turns.stop()

    named = {"lr_scheduler_type": "constant", "optim": "adamw_torch_fused", "report_to": "none"}
    named |= {"train_sampling_strategy": "sequential", "logging_strategy": "no", "save_strategy": "no"}
    flags = dict.fromkeys(("gradient_checkpointing", "dataloader_pin_memory"), False)
    flags["bf16"] = settings.dtype == "bf16"  # autocast, TRL's default
    flags |= dict.fromkeys(("use_cpu", "disable_tqdm"), True)
    numbers = {"per_device_train_batch_size": size[0], "num_train_epochs": settings.rounds + 1}
    numbers |= {"learning_rate": RATES[task], "weight_decay": 0.0, "max_grad_norm": 0.0}
    arguments = config(str(Path(settings.folder).parent / "trl"), **numbers, **named, **flags, **own)
    kind = "SEQ_CLS" if task == "reward" else "CAUSAL_LM"
    lora = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear", task_type=kind)
    given: dict[str, Any] = {"processing_class": AutoTokenizer.from_pretrained(settings.folder)}
    given |= {"train_dataset": Dataset.from_list(rows), "peft_config": lora, "callbacks": [Rounds()]}
    number = torch.bfloat16 if settings.dtype == "bf16" else torch.float32
    trainer = Trainer(loader(settings.folder, dtype=number), args=arguments, **given)
    set_start(trainer.model)
    trainer.train()
    save_losses(settings, f"trl: {task}", size, losses)


def compare(found: dict[tuple[str, str], list[float]], settings: Settings, tolerance: float) -> list[Row]:
    """Return a row for each task and size; raise ValueError where both sides train unlike things."""
    rows = []
    for (way, size), theirs in found.items():
        side, _, task = way.partition(": ")
        if side != "trl" or (ours := found.get((f"fedlight: {task}", size))) is None:
            continue
        files = (loss_file(settings, f"{side}: {task}", size) for side in ("fedlight", "trl"))
        own, other = (json.loads(file.read_text()) for file in files)
        apart = max(abs(a - b) / abs(b) for a, b in zip(own, other, strict=True))
        if not apart <= tolerance:
            raise ValueError(f"{task}, {size}: losses {own} and {other} of TRL differ by up to {apart:.2g}")
        ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
        speeds = [settings.steps / statistics.median(seconds) for seconds in (ours, theirs)]
        ratio = statistics.median(ratios), min(ratios), max(ratios)
        values = task, size, *speeds, *ratio, own[0], own[-1], apart
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    return rows


def work(way: str, settings: Settings) -> None:
    """Train all sizes in turns, as one of the processes."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    (side, _, task), turns = way.partition(": "), Turns()
    print("@ 0", flush=True)
    for size in settings.sizes:
        turns.begin()
        (train_trl if side == "trl" else train_own)(task, settings, size, turns)
        turns.end()


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trl", required=True, help="a Python that has TRL")
    parser.add_argument("--only", nargs="+", choices=RATES, default=[*RATES], help="these tasks alone")
    parser.add_argument("--sizes", nargs="+", default=["4x32", "8x128"], help="of a batch: examples x tokens")
    for name, value in (("rounds", 7), ("steps", 10), ("hidden", 128), ("layers", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument(
        "--model", type=Path, help="folder of a language model, in the place of the random one"
    )
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the base under LoRA")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tolerance", type=float, default=1e-3, help="largest relative difference of losses")
    parser.add_argument("--json", type=Path, help="where the rows go as well")
    parser.add_argument("--cpu", action="store_true", help="processor seconds, of ways with one process")
    options = parser.parse_args(argv)
    os.environ |= {"PEERS_CLOCK": "cpu"} if options.cpu else {}
    sizes, rows = [list(map(int, size.split("x"))) for size in options.sizes], []
    with tempfile.TemporaryDirectory() as folder:
        numbers = {name: getattr(options, name) for name in ("rounds", "steps", "hidden", "layers", "dtype")}
        log = Path(folder)
        settings = Settings(str(log / "model"), sizes, **numbers)
        weights = make_model(settings, options.model, options.threads, log)
        print(f"{weights:,.0f} parameters, {options.steps} steps a round", flush=True)
        for task in options.only:
            ways = [f"fedlight: {task}", f"trl: {task}"]
            found = measure(ways, settings, {ways[1]: options.trl}, options.threads, log, Path(__file__))
            rows += compare(found, settings, options.tolerance)
    show(rows, options.json)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[2].startswith("{"):
        work(sys.argv[1], Settings(**json.loads(sys.argv[2])))
    else:
        main()
