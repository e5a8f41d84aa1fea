"""Cost of a client's training step: a binary selector, a scalar reward model and DPO, on the same pairs.

F. Wu et al. (FedBis, ICLR 2025, https://arxiv.org/abs/2407.03038) hold that a selector takes much less computation than a
reward model. Measured here per step of 8 pairs, on a random Llama with GPT-2's vocabulary of 50,257 and LoRA. With P
tokens of prompt and R of each response, a selector reads P + 2 R tokens and Q of its question, in one order or, because
the paper doubles its data, in both; a reward model and DPO read 2 (P + R). So in one order a selector reads P - Q tokens
less than they do, in both orders 2 (R + Q) more. A naive selector computes the logits of the
whole vocabulary at every position, like a plain forward pass, where this library reads two rows at one. In this
narrow model the output head weighs more than the layers, in a large one less: its cost for DPO and the naive selector
is then a smaller part; --hidden and --layers tell.

* seconds: median; the methods alternate within one run, so that a noisy machine disturbs all alike.
* FLOPs: of the matrix products, forward and backward, attention as full squares.
* saved: storages that the forward pass keeps for the backward pass, each counted once, parameters left out.
* peak: storages alive at once in the step, beyond those that were there before it.
* adapter: bytes that are trained and sent, fp32.

All texts of a batch are equally long, so nothing is padded.

Run: OMP_NUM_THREADS=1 python benchmarks/selector_cost.py [--texts 350x40 40x200] [--json FILE]
"""

import argparse
import statistics
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from shown_rows import show
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from fedlight.modules.dpo import DPOModule
from fedlight.modules.functional import choice_loss
from fedlight.modules.language.adapters import Lora
from fedlight.modules.language.base_model import Execution
from fedlight.modules.language.module import LanguageModule
from fedlight.modules.reward import RewardModule
from fedlight.modules.selector import SelectorModule

Step = Callable[[int], None]
COLUMNS = ("seconds", "gflop", "saved_mib", "peak_mib")


class NaiveSelector(SelectorModule):
    """Logits of every token of the vocabulary at every position; two are used."""

    def choice_logits(self, batch: dict[str, Tensor]) -> Tensor:
        """Logits of A and B, ``(batch, 2)``."""
        assert self.choice_rows is not None
        logits = self.causal_lm(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        last = batch["attention_mask"].sum(dim=1) - 1
        return logits[torch.arange(len(last)), last][:, self.choice_rows]

    def example_losses(self, batch: dict[str, Tensor]) -> Tensor:
        """Cross-entropy over the two choices, ``(batch,)``."""
        return choice_loss(self.choice_logits(batch), batch["labels"])


def save_model(folder: str, options: argparse.Namespace) -> None:
    """A random Llama with the embedded world's tokenizer, which is used for the choices' names alone."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from fedlight.toy import MODEL

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


def texts(prompts: Tensor, *parts: Tensor) -> dict[str, Tensor]:
    """Prompts with what follows them, all ``(batch, tokens)``; the prompt has no labels."""
    ids = torch.cat([prompts, *parts], dim=1)
    labels = torch.where(torch.arange(ids.shape[1]) < prompts.shape[1], -100, ids)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def draw_pairs(seed: int, prompt: int, response: int, options: argparse.Namespace) -> dict[str, Any]:
    """The same random pairs as each method reads them: ``one`` order, ``both`` orders, ``pairs`` of two texts."""
    stream = torch.Generator().manual_seed(seed)
    sizes = (prompt, response, response, options.question)
    x, a, b, question = (
        torch.randint(5, options.vocabulary, (options.pairs, size), generator=stream) for size in sizes
    )
    zeros = torch.zeros(options.pairs, dtype=torch.long)
    first, second = texts(x, a, b, question), texts(x, b, a, question)
    both = {name: torch.cat([first[name], second[name]]) for name in first}
    return {
        "one": {**first, "labels": zeros},
        "both": {**both, "labels": torch.cat([zeros, zeros + 1])},
        "pairs": {"chosen": texts(x, a), "rejected": texts(x, b)},
    }


def make_methods(folder: str, prompt: int, response: int, options: argparse.Namespace) -> dict[str, Any]:
    """Name -> module, step, sequences and tokens of a step; the others are compared with the first."""
    shown, alone = prompt + 2 * response + options.question, prompt + response
    kinds: list[tuple[str, type[LanguageModule], str, int, int, bool]] = [
        ("selector, one order", SelectorModule, "one", 1, shown, True),
        ("selector, both orders", SelectorModule, "both", 2, shown, True),
        ("naive selector, one order", NaiveSelector, "one", 1, shown, True),
        ("reward model", RewardModule, "pairs", 2, alone, True),
        ("DPO, first epoch", DPOModule, "pairs", 2, alone, True),
        (
            "DPO, later epochs",
            DPOModule,
            "pairs",
            2,
            alone,
            False,
        ),  # known pairs: the reference is remembered
    ]
    methods = {}
    for name, kind, view, sequences, tokens, new in kinds:
        module = kind(folder, lora=Lora(rank=options.rank), dtype="fp32", execution=Execution(prefix="off"))
        module.configure_model()
        methods[name] = {
            "step": make_step(module, view, new, prompt, response, options),
            "module": module,
            "sequences": sequences * options.pairs,
            "tokens": tokens,
        }
    return methods


def make_step(
    module: LanguageModule, view: str, new: bool, prompt: int, response: int, options: argparse.Namespace
) -> Step:
    """One training step with the pairs of a number, or where they are not ``new`` always with the same."""
    optimizer: Any = module.configure_optimizers()
    module.train()

    def step(number: int) -> None:
        optimizer.zero_grad()
        batch = draw_pairs(number if new else 0, prompt, response, options)[view]
        module.example_losses(batch).mean().backward()
        optimizer.step()

    return step


def count_flops(step: Step, number: int) -> int:
    """Floating-point operations of a step's matrix products."""
    # The fused attention of CPUs is not known to the counter; as matrix products it is.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        step(number)
    return counter.get_total_flops()


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that are made inside it, and the most that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation and looks at what came out."""
        known = {
            id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and id(leaf.untyped_storage()) not in known:
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: Any) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, storage.nbytes())

    def _free(self, num_bytes: int) -> None:
        self.now -= num_bytes


def count_bytes(step: Step, number: int, module: torch.nn.Module) -> tuple[int, int]:
    """Bytes that the forward pass keeps for the backward pass, and the most that are alive at once in the step."""
    own = {part.untyped_storage().data_ptr() for part in [*module.parameters(), *module.buffers()]}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with LiveBytes() as live, saved_tensors_hooks(pack, lambda tensor: tensor):
        step(number)
    return sum(saved.values()), live.peak


def measure(folder: str, prompt: int, response: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per method."""
    methods = make_methods(folder, prompt, response, options)
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for method in methods.values():
        method["step"](0)  # makes the optimizer's moments, and DPO's references of the pairs 0
    for number in range(1, options.steps + 1):
        for name, method in methods.items():
            start = time.perf_counter()
            method["step"](number)
            seconds[name].append(time.perf_counter() - start)
    rows = []
    for name, method in methods.items():
        module, step, last = method["module"], method["step"], options.steps
        saved, peak = count_bytes(step, last + 2, module)
        trained = [weight for weight in module.parameters() if weight.requires_grad]
        rows.append(
            {
                "prompt_tokens": prompt,
                "response_tokens": response,
                "method": name,
                "sequences": method["sequences"],
                "tokens": method["tokens"],
                "seconds": statistics.median(seconds[name]),
                "gflop": count_flops(step, last + 1) / 1e9,
                "saved_mib": saved / 2**20,
                "peak_mib": peak / 2**20,
                "adapter_bytes": sum(weight.numel() * weight.element_size() for weight in trained),
            }
        )
    for row in rows:
        row["ratios"] = {name: row[name] / rows[0][name] for name in COLUMNS}
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table for each length of texts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    lengths = ["350x40", "40x200"]
    parser.add_argument("--texts", nargs="+", default=lengths, metavar="PxR", help="prompt x response tokens")
    parser.add_argument("--question", type=int, default=40, help="tokens that only the selector reads")
    for name, value in (("pairs", 8), ("steps", 5), ("hidden", 128), ("layers", 4), ("rank", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--vocabulary", type=int, default=50_257)
    parser.add_argument("--json", type=Path, help="writes the figures to this file")
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")
    model = f"Llama, hidden {options.hidden}, {options.layers} layers, vocabulary {options.vocabulary:,}"
    print(f"{model}, LoRA r {options.rank}; {options.pairs} pairs a step, {torch.get_num_threads()} threads")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, options)
        for text in options.texts:
            prompt, response = map(int, text.split("x"))
            rows += measure(folder, prompt, response, options)
    show(rows, options.json, model=model)


if __name__ == "__main__":
    main()
