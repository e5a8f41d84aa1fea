"""Pretraining of the embedded world's tiny language model: ``python benchmarks/toy_pretrain.py --output DIR``.

A Llama of about 0.4 M parameters with a word-level tokenizer is trained from scratch on the world's text alone: on
summaries of posts (it learns to write good and bad ones) and on neutral exercises about pairs of summaries (it learns to
read them). It sees no client, taste, vote or utility. The README of `fedlight.toy` has the results.

A transformer needs many thousand steps to learn to compare two texts word by word, most of them on a plateau until its
first attention heads look at useful places. Four heads therefore start there, in the spirit of Trockman and Kolter,
"Mimetic Initialization of Self-Attention Layers", ICML 2023, https://arxiv.org/abs/2305.09828: one looks at the previous
word, one at the last marker (``POST``, ``A``, ``B``, ...), and two at earlier uses of the same word. They are trained like
the rest. In short trials of equally many steps, a model of width 96 with these heads did not confuse the words of the two
summaries, and a plain one of width 64 did; the two same-word heads alone made no difference within 250 steps.
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
from toy_exercises import JUDGEMENTS, MARKERS, SPOKEN, check_text, pair_text, summary_text

from fedlight.support.seeding import derive_seed
from fedlight.toy import world

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.models.llama.modeling_llama import LlamaAttention

SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
WIDTH, LAYERS, HEADS, HEAD_WIDTH = 96, 4, 4, 32
ROPE_BASE = 10_000.0


class Schedule(NamedTuple):
    """Length and speed of the training.

    Attributes:
        steps: optimizer steps; the learning rate warms up over 100 and falls to zero along a cosine.
        writing_steps: number of first steps without pairs: words and facts come first.
        lr: peak learning rate of AdamW.
        seed: of the first weights and of all texts.
    """

    steps: int = 2400
    writing_steps: int = 400
    lr: float = 3e-3
    seed: int = 0


class Batch(NamedTuple):
    """Token ids and labels, each ``(batch, tokens)``; labels are -100 where nothing is learned.

    Attributes:
        ids: the texts, padded on the right.
        written: labels on the words of summaries and their end.
        answered: labels on the letters that answer a question.
        judged: labels on tallies' values and on marks.
    """

    ids: Tensor
    written: Tensor
    answered: Tensor
    judged: Tensor


class Reader:
    """Converter of texts to batches."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        self._tokenizer = tokenizer
        self._id = tokenizer.convert_tokens_to_ids
        self._judgements = self._id(list(JUDGEMENTS))
        self._openings = self._id(["SUMMARY", "CHECK", "A"])

    def batch(self, texts: list[str]) -> Batch:
        """Return texts of any kind as a batch."""
        encoded = self._tokenizer(
            texts, padding=True, padding_side="right", return_tensors="np", add_special_tokens=False
        )
        ids = encoded["input_ids"]
        position = np.arange(ids.shape[1])
        start = np.isin(ids, self._openings).argmax(1)[:, None] + 2  # after the opening and its colon
        asked = ids == self._id("which")
        end = np.where(asked.any(1), asked.argmax(1), ids.shape[1])[:, None]
        judged = np.isin(ids, self._judgements)
        answered = np.zeros_like(judged)
        answered[:, 2:] = ids[:, :-2] == self._id("CHOICE")  # after "CHOICE :"
        inside = (position >= start) & (position < end) & (ids != self._tokenizer.pad_token_id)
        masks = (inside & ~judged, answered, judged)
        return Batch(torch.from_numpy(ids), *(torch.from_numpy(np.where(mask, ids, -100)) for mask in masks))


def draw_texts(rng: random.Random, pairs: bool) -> list[list[str]]:
    """Return the lists of texts of one step: single summaries, half of them checked, and pairs, every third checked."""
    count = 8 if pairs else 24
    singles = [summary_text(rng) for _ in range(count)] + [check_text(rng) for _ in range(count)]
    return [singles, [pair_text(rng, mark=index % 3 == 0) for index in range(24)]] if pairs else [singles]


def losses(model: "LlamaForCausalLM", batch: Batch) -> dict[str, Tensor]:
    """Return the mean cross-entropy of each kind of label in the batch."""
    logits = model(input_ids=batch.ids).logits[:, :-1].flatten(0, 1)  # each predicts the next token
    kinds = {kind: getattr(batch, kind)[:, 1:].flatten() for kind in ("written", "answered", "judged")}
    return {
        kind: functional.cross_entropy(logits, labels, ignore_index=-100)
        for kind, labels in kinds.items()
        if (labels >= 0).any()
    }


def make_tokenizer() -> "PreTrainedTokenizerFast":
    """Return a tokenizer with one token per word or punctuation mark of the world, joined by blanks when decoded."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL.values(), *MARKERS, ":", ".", "?", *SPOKEN, *JUDGEMENTS]
    words += [*world.NAMES, *world.VERBS, *world.OBJECTS, *world.POLITE, *world.RUDE, *world.FILLERS]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, model_max_length=256, **SPECIAL
    )


def make_model(tokenizer: "PreTrainedTokenizerFast", seed: int) -> "LlamaForCausalLM":
    """Return the untrained model: four layers of width 96, tied embeddings, biases in attention, four heads with a start."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)  # the global stream draws the first weights
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        head_dim=HEAD_WIDTH,
        max_position_embeddings=256,
        initializer_range=0.05,
        tie_word_embeddings=True,
        attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE},
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    attention: list[LlamaAttention] = [layer.self_attn for layer in model.model.layers]
    markers = model.model.embed_tokens.weight[tokenizer.convert_tokens_to_ids(list(MARKERS))]
    with torch.no_grad():
        look_at_previous_word(attention[0], head=0)
        look_at_last_marker(attention[0], markers, head=1)
        look_at_same_word(attention[1], head=0)
        look_at_same_word(attention[2], head=0)
    return model


def look_at_previous_word(
    attention: "LlamaAttention", head: int, sharpness: float = 8.0, frequencies: int = 4
) -> None:
    """Set constant queries and keys whose rotated product, sum over f of cos(f * (distance - 1)), peaks at distance one."""
    amplitude = (sharpness * HEAD_WIDTH**0.5) ** 0.5  # scores are divided by sqrt(HEAD_WIDTH)
    angle = ROPE_BASE ** (-torch.arange(0, HEAD_WIDTH, 2) / HEAD_WIDTH)  # RoPE's, in radians
    used = (torch.arange(HEAD_WIDTH // 2) < frequencies) * amplitude
    rows = _clear_rows(attention, head)
    attention.k_proj.bias[rows] = torch.cat([used, torch.zeros_like(used)])
    attention.q_proj.bias[rows] = torch.cat([used * angle.cos(), -used * angle.sin()])


def look_at_last_marker(
    attention: "LlamaAttention", markers: Tensor, head: int, sharpness: float = 12.0
) -> None:
    """Set constant queries, and keys that are large for the embeddings of markers ``(markers, width)`` and fade slowly."""
    slow = (5, 6)  # periods of 112 and 199 words: in a text of the world, nearer is always stronger
    amplitude = (sharpness / len(slow) * HEAD_WIDTH**0.5) ** 0.5
    rows = _clear_rows(attention, head)
    for index in slow:
        attention.q_proj.bias[rows.start + index] = amplitude
        attention.k_proj.weight[rows.start + index] = (
            functional.normalize(markers).sum(0) * amplitude / WIDTH**0.5
        )


def look_at_same_word(attention: "LlamaAttention", head: int, sharpness: float = 5.0) -> None:
    """Set equal random projections for queries and keys, in the slow frequencies only, so distance hardly matters."""
    slow = [index for index in range(HEAD_WIDTH) if index % (HEAD_WIDTH // 2) >= 5]
    rows = _clear_rows(attention, head)
    projection = torch.zeros(HEAD_WIDTH, WIDTH)
    projection[slow] = torch.linalg.qr(torch.randn(WIDTH, len(slow)))[0].T  # orthonormal rows
    projection *= (sharpness * HEAD_WIDTH**0.5 / len(slow)) ** 0.5
    attention.q_proj.weight[rows] = projection
    attention.k_proj.weight[rows] = projection


def _clear_rows(attention: "LlamaAttention", head: int) -> slice:
    rows = slice(head * HEAD_WIDTH, (head + 1) * HEAD_WIDTH)
    attention.q_proj.weight[rows] = 0
    attention.k_proj.weight[rows] = 0
    return rows


def pretrain(schedule: Schedule, output: Path, save_every: int = 250) -> None:
    """Train the model from scratch and save it with its tokenizer; a function of the schedule on one machine."""
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, derive_seed(schedule.seed, "toy", "first weights")).train()
    reader, rng = Reader(tokenizer), random.Random(derive_seed(schedule.seed, "toy", "texts"))
    # No decay of biases and norms: the heads with a start live in their biases.
    groups = [
        {"params": [weight for weight in model.parameters() if weight.ndim > 1], "weight_decay": 0.05},
        {"params": [weight for weight in model.parameters() if weight.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=schedule.lr, betas=(0.9, 0.98))
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, schedule.steps))
    start = time.perf_counter()
    tokenizer.save_pretrained(output)
    for step in range(1, schedule.steps + 1):
        texts = draw_texts(rng, pairs=step > schedule.writing_steps)
        by_text = [losses(model, reader.batch(kind)) for kind in texts]
        optimizer.zero_grad()
        torch.stack([loss for kinds in by_text for loss in kinds.values()]).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        if step % 50 == 0:
            shown = " | ".join(
                " ".join(f"{kind} {loss.item():.3f}" for kind, loss in kinds.items()) for kinds in by_text
            )
            print(f"step {step}: {shown} ({time.perf_counter() - start:.0f} s)", flush=True)
        if step % save_every == 0 or step == schedule.steps:
            model.save_pretrained(output)


def warmup_cosine(step: int, steps: int, warmup: int = 100) -> float:
    """Return the share of the peak learning rate at a step.

    Examples:
        >>> warmup_cosine(49, 1100), warmup_cosine(100, 1100), warmup_cosine(600, 1100), warmup_cosine(1100, 1100)
        (0.5, 1.0, 0.5, 0.0)
    """
    progress = min(1.0, max(0, step - warmup) / max(1, steps - warmup))
    return round(min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * progress)), 12)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Pretrain the tiny language model of the embedded world.")
    parser.add_argument("--output", type=Path, required=True, help="folder for the model and its tokenizer")
    for name, default in Schedule()._asdict().items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    arguments = vars(parser.parse_args())
    pretrain(output=arguments.pop("output"), schedule=Schedule(**arguments))


if __name__ == "__main__":
    main()
