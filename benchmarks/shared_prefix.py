"""CPU time of texts that begin alike: a shared row, a row per text, and TRL's DPO, on one pretrained model.

Random tokens, LoRA of rank 8 on all linear layers, no dropout, one thread. A size is P + R: tokens of the prompt and of each
response. The ways alternate, and each figure is the median of the CPU seconds of its steps.

* DPO: forward and backward of one pair, with the reference's pass. TRL's trainer gets the same tokens and the same adapter;
  the run ends with an error where the losses differ by more than ``--tolerance`` in fp32.
* reward pair: forward and backward of a reward model.
* both orders: forward and backward of a selector on P + R + R tokens in both orders.
* four choices: log-likelihoods of four continuations, without gradients.

``--trl`` names a Python with trl, accelerate, torch, transformers, peft and datasets; without it TRL is left out.

Run: OMP_NUM_THREADS=1 python benchmarks/shared_prefix.py --trl PYTHON [--sizes 140x44 ...] [--json FILE]
"""

import argparse
import json
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedlight.modules.language.adapters import Lora
from fedlight.modules.language.base_model import Execution

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
VOCABULARY = 40000
WORKS = ("DPO", "reward pair", "both orders", "four choices")
LORA = {"lora": Lora(rank=8, alpha=16, dropout=0.0)}
Row = dict[str, Any]


def draw(size: Sequence[int], responses: int) -> list[list[int]]:
    """Return a prompt and responses of random tokens."""
    stream = torch.Generator().manual_seed(0)
    lengths = [size[0], *[size[1]] * responses]
    return [torch.randint(10, VOCABULARY, (length,), generator=stream).tolist() for length in lengths]


def set_adapter(network: torch.nn.Module) -> None:
    """Give the adapter the same values on both sides, far from zero."""
    stream = torch.Generator().manual_seed(1)
    for name, weight in sorted(network.named_parameters()):
        if weight.requires_grad and "lora_" in name:
            weight.data.copy_(torch.randn(weight.shape, generator=stream) * 0.02)


def make_text(*parts: list[int]) -> dict[str, Tensor]:
    """Return one text; its first part has no labels."""
    ids = torch.tensor([[token for part in parts for token in part]])
    labels = torch.where(torch.arange(ids.shape[1]) < len(parts[0]), -100, ids)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def make_step(work: str, model: str, dtype: str, prefix: str, size: Sequence[int]) -> Callable[[], float]:
    """Return a step of fedlight, which returns its loss or sum."""
    from fedlight import DPOModule, RewardModule, SelectorModule, SFTModule
    from fedlight.modules.language.scoring import Scored, score

    kinds: list[Any] = [DPOModule, RewardModule, SelectorModule, SFTModule]
    module = dict(zip(WORKS, kinds, strict=True))[work](
        model, dtype=dtype, execution=Execution(prefix=prefix), **LORA
    )
    module.configure_model()
    set_adapter(module.network)
    module.train()
    prompt, first, second, *others = draw(size, 4)
    batch: dict[str, Any] = {"chosen": make_text(prompt, first), "rejected": make_text(prompt, second)}
    if work == "both orders":
        orders = [make_text(prompt, first, second), make_text(prompt, second, first)]
        batch = {name: torch.cat([one[name] for one in orders]) for name in orders[0]}
        batch["labels"] = torch.tensor([0, 1])
    texts = [Scored(prompt + answer, len(prompt)) for answer in (first, second, *others)]

    def train() -> float:
        if work == "DPO":
            module._reference.clear()
        module.zero_grad()
        loss = module.example_losses(batch).mean()
        loss.backward()
        return loss.item()

    def choose() -> float:
        return sum(one.log_prob for one in score(module.causal_lm, texts, 16, module.shared_prefix))

    return choose if work == "four choices" else train


def time_step(step: Callable[[], float]) -> tuple[float, float]:
    """Return CPU seconds and loss of a step."""
    start = time.process_time()
    loss = step()
    return time.process_time() - start, loss


def measure(work: str, model: str, dtype: str, size: Sequence[int], steps: int) -> Row:
    """Return seconds of both ways, their ratio, and by how much their losses differ, relatively."""
    ways = {prefix: make_step(work, model, dtype, prefix, size) for prefix in ("off", "auto")}
    found = [{way: time_step(step) for way, step in ways.items()} for _ in range(steps + 1)][1:]
    plain, shared = (statistics.median(turn[way][0] for turn in found) for way in ways)
    loss, other = (found[0][way][1] for way in ways)
    row = {"dtype": dtype, "work": f"{work}, {size[0]} + {size[1]}", "plain": plain, "shared": shared}
    return row | {"ratio": shared / plain, "apart": abs(loss - other) / abs(loss), "loss": loss}


def measure_trl(model: str, dtype: str, size: Sequence[int], steps: int) -> Row:
    """Return seconds and loss of TRL's DPO, in a process with TRL."""
    import tempfile

    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer

    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    rows = [dict(zip(names, draw(size, 2), strict=True))]

    class Trainer(trl.DPOTrainer):  # type: ignore[misc, name-defined]
        def _prepare_dataset(self, dataset: Any, *rest: Any, **options: Any) -> Any:
            return dataset  # it has tokens already

    flags = dict.fromkeys(("gradient_checkpointing", "bf16", "dataloader_pin_memory"), False)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            AutoModelForCausalLM.from_pretrained(model, dtype=DTYPES[dtype]),
            args=trl.DPOConfig(
                folder, per_device_train_batch_size=1, beta=0.1, use_cpu=True, report_to="none", **flags
            ),
            processing_class=AutoTokenizer.from_pretrained(model),
            train_dataset=Dataset.from_list(rows),
            peft_config=LoraConfig(
                r=8, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
            ),
        )
        set_adapter(trainer.model)
        trainer.model.train()
        batch = next(iter(trainer.get_train_dataloader()))
        trainer.current_gradient_accumulation_steps = 1

        def step() -> float:
            trainer.model.zero_grad()
            return float(trainer.training_step(trainer.model, batch))

        found = [time_step(step) for _ in range(steps + 1)][1:]
    return {"trl": statistics.median(seconds for seconds, _ in found), "trl_loss": found[0][1]}


def ask_trl(options: argparse.Namespace, model: str, row: Row, size: Sequence[int]) -> Row:
    """Return the row with TRL's seconds; raise ValueError where it computes something else."""
    given = json.dumps([model, row["dtype"], size, options.steps])
    command = [options.trl, __file__, "--as-trl", given]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    row |= json.loads(told[-1])
    apart = abs(row.pop("trl_loss") - row["loss"]) / row["loss"]
    if row["dtype"] == "fp32" and apart > options.tolerance:
        raise ValueError(f"{row['work']}: the losses of TRL and fedlight differ by {apart:.2g}")
    return row | {"of_trl": row["shared"] / row["trl"], "plain_of_trl": row["plain"] / row["trl"]}


def main(argv: Sequence[str] | None = None) -> None:
    """Print a row for each type, work and size."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--trl", help="a Python that has TRL")
    parser.add_argument("--as-trl", help=argparse.SUPPRESS)
    parser.add_argument("--sizes", nargs="+", default=["64x32", "140x44", "400x50", "40x200"])
    parser.add_argument("--works", nargs="+", choices=WORKS, default=[*WORKS])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=[*DTYPES])
    parser.add_argument("--steps", type=int, default=2, help="measured steps; one more comes first")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="largest relative difference of losses")
    parser.add_argument("--json", type=Path, help="where the rows go as well")
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if options.as_trl:
        print(json.dumps(measure_trl(*json.loads(options.as_trl))))
        return
    from fedlight.pretrained.hub import find_model

    rows = []
    for dtype in options.dtypes:
        for work in options.works:
            for size in ([*map(int, size.split("x"))] for size in options.sizes):
                row = measure(work, options.model, dtype, size, options.steps)
                if options.trl and work == "DPO":
                    row = ask_trl(options, str(find_model(options.model)), row, size)
                rows.append(row)
                print(json.dumps(row), flush=True)
                if options.json:
                    options.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
