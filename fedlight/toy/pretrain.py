"""Makes the tiny language model of the embedded world: ``python -m fedlight.toy.pretrain --output DIR``.

A Llama of some 0.4 M parameters with a word-level tokenizer is trained from nothing on the world's text alone: on
summaries of posts (it learns to write them, good and bad) and on neutral exercises about pairs of summaries (it learns
to read them). No client, taste, vote or utility is seen here. See README.md for what came out.
"""

import argparse
import math
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedlight.support.seeding import derive_seed
from fedlight.toy.exercises import JUDGEMENTS, check_text, pair_text, summary_text
from fedlight.toy.network import make_model, make_tokenizer

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


class Schedule(NamedTuple):
    """How long and how fast to train.

    Attributes:
        steps: optimizer steps; the learning rate warms up over 100 and falls to zero along a cosine.
        writing_steps: the first steps, without pairs: words and facts come first.
        lr: peak learning rate of AdamW.
        seed: of the first weights and of all texts.
    """

    steps: int = 2400
    writing_steps: int = 400
    lr: float = 3e-3
    seed: int = 0


class Batch(NamedTuple):
    """Token ids and what is to be learned of them, each ``(batch, tokens)``; labels are -100 elsewhere.

    Attributes:
        ids: the texts, padded on the right.
        written: labels on the words of summaries, and on what ends them.
        answered: labels on the letters that answer a question.
        judged: labels on tallies' values and on marks.
    """

    ids: Tensor
    written: Tensor
    answered: Tensor
    judged: Tensor


class Reader:
    """Turns texts into batches."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        self._tokenizer = tokenizer
        self._id = tokenizer.convert_tokens_to_ids
        self._judgements = self._id(list(JUDGEMENTS))
        self._openings = self._id(["SUMMARY", "CHECK", "A"])

    def batch(self, texts: list[str]) -> Batch:
        """Encodes texts of any kind."""
        encoded = self._tokenizer(
            texts, padding=True, padding_side="right", return_tensors="np", add_special_tokens=False
        )
        ids = encoded["input_ids"]
        position = np.arange(ids.shape[1])
        start = np.isin(ids, self._openings).argmax(1)[:, None] + 2
        asked = ids == self._id("which")
        end = np.where(asked.any(1), asked.argmax(1), ids.shape[1])[:, None]
        judged = np.isin(ids, self._judgements)
        answered = np.zeros_like(judged)
        answered[:, 2:] = ids[:, :-2] == self._id("CHOICE")
        inside = (position >= start) & (position < end) & (ids != self._tokenizer.pad_token_id)
        masks = (inside & ~judged, answered, judged)
        return Batch(torch.from_numpy(ids), *(torch.from_numpy(np.where(mask, ids, -100)) for mask in masks))


def draw_texts(rng: random.Random, pairs: bool) -> list[list[str]]:
    """The two lists of texts of one step: single summaries, half of them checked, and pairs, every third checked."""
    count = 8 if pairs else 24
    singles = [summary_text(rng) for _ in range(count)] + [check_text(rng) for _ in range(count)]
    return [singles, [pair_text(rng, mark=index % 3 == 0) for index in range(24)]] if pairs else [singles]


def losses(model: "LlamaForCausalLM", batch: Batch) -> dict[str, Tensor]:
    """Mean cross-entropy of each kind of label that the batch has."""
    logits = model(input_ids=batch.ids).logits[:, :-1].flatten(0, 1)
    kinds = {kind: getattr(batch, kind)[:, 1:].flatten() for kind in ("written", "answered", "judged")}
    return {
        kind: functional.cross_entropy(logits, labels, ignore_index=-100)
        for kind, labels in kinds.items()
        if (labels >= 0).any()
    }


def pretrain(schedule: Schedule, output: Path, save_every: int = 250) -> None:
    """Trains the model from nothing and saves it with its tokenizer; a function of the schedule on one machine."""
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, derive_seed(schedule.seed, "toy", "first weights")).train()
    reader, rng = Reader(tokenizer), random.Random(derive_seed(schedule.seed, "toy", "texts"))
    optimizer = torch.optim.AdamW(_decayed(model), lr=schedule.lr, betas=(0.9, 0.98))
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, schedule.steps))
    start = time.perf_counter()
    tokenizer.save_pretrained(output)
    for step in range(1, schedule.steps + 1):
        texts = draw_texts(rng, pairs=step > schedule.writing_steps)
        found = [losses(model, reader.batch(kind)) for kind in texts]
        optimizer.zero_grad()
        torch.stack([loss for kinds in found for loss in kinds.values()]).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        if step % 50 == 0:
            shown = " | ".join(
                " ".join(f"{kind} {loss.item():.3f}" for kind, loss in kinds.items()) for kinds in found
            )
            print(f"step {step}: {shown} ({time.perf_counter() - start:.0f} s)", flush=True)
        if step % save_every == 0 or step == schedule.steps:
            model.save_pretrained(output)


def warmup_cosine(step: int, steps: int, warmup: int = 100) -> float:
    """The share of the peak learning rate at a step.

    Example:
        >>> warmup_cosine(49, 1100), warmup_cosine(100, 1100), warmup_cosine(600, 1100), warmup_cosine(1100, 1100)
        (0.5, 1.0, 0.5, 0.0)
    """
    progress = min(1.0, max(0, step - warmup) / max(1, steps - warmup))
    return round(min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * progress)), 12)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Pretrain the tiny language model of the embedded world.")
    parser.add_argument("--output", type=Path, required=True, help="folder for the model and its tokenizer")
    for name, default in Schedule()._asdict().items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    arguments = vars(parser.parse_args())
    pretrain(output=arguments.pop("output"), schedule=Schedule(**arguments))


def _decayed(model: "LlamaForCausalLM") -> list[dict[str, object]]:
    # Biases and norms are spared: the heads with a start (see network.py) live in their biases.
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    vectors = [weight for weight in model.parameters() if weight.ndim < 2]
    return [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]


if __name__ == "__main__":
    main()
