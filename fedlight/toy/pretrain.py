"""Makes the tiny language model of the embedded world: ``python -m fedlight.toy.pretrain --output DIR``.

A Llama of some 0.7 M parameters with a word-level tokenizer is trained from nothing on the world's text alone, half of
every step on summaries of posts (it learns to write them, good and bad), half on neutral comparisons of two summaries
(it learns to read them). No client, taste, vote or utility is seen here. See README.md for what came out.
"""

import argparse
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedlight.federation.seeding import derive_seed
from fedlight.toy import world
from fedlight.toy.questions import QUESTIONS, answers, ask, name_questions

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
QUESTIONS_PER_PAIR = 6


class Schedule(NamedTuple):
    """How long and how fast to train.

    Attributes:
        steps: optimizer steps; the learning rate warms up over 200 and falls to zero along a cosine.
        writing_steps: the first steps, with 32 summaries to write and nothing else: copying comes first.
        lr: peak learning rate of AdamW.
    """

    steps: int = 6000
    writing_steps: int = 600
    lr: float = 3e-3


def make_tokenizer() -> "PreTrainedTokenizerFast":
    """One token per word or punctuation mark of the world, joined by blanks when decoded."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate([*SPECIAL.values(), *_words_of_the_world()])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, model_max_length=256, **SPECIAL
    )


def make_model(tokenizer: "PreTrainedTokenizerFast", seed: int) -> "LlamaForCausalLM":
    """The untrained model: four layers of width 128."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=256,
        initializer_range=0.05,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


def summary_text(rng: random.Random) -> str:
    """A post and a summary of it, ready for the tokenizer, with the end of the text."""
    post = world.draw_post(rng)
    prompt = world.GENERATION_TEMPLATE.format(prompt=post)
    return f"{prompt} {world.draw_summary(rng, post)} {SPECIAL['eos_token']}"


def pair_text(rng: random.Random) -> str:
    """A post, two summaries and up to six questions about them with their answers, in the selector's format."""
    post = world.draw_post(rng)
    a, b = world.draw_summary(rng, post), world.draw_summary(rng, post)
    asked = ask(rng, answers(world.measure(post, a), world.measure(post, b)), QUESTIONS_PER_PAIR - 1)
    asked += ask(rng, name_questions(a, b), QUESTIONS_PER_PAIR - len(asked))
    rng.shuffle(asked)
    filled = world.CHOICE_TEMPLATE.format(prompt=post, response_a=a, response_b=b)
    text, slot = filled.split(BETTER)
    return text + "\n".join(f"{question}{slot} {answer}" for question, answer in asked)


BETTER = "which is better ?"


class Reader:
    """Turns texts into batches with their two kinds of targets."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        self._tokenizer = tokenizer
        self._id = tokenizer.convert_tokens_to_ids

    def summaries(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        """Token ids and labels ``(batch, tokens)``: what follows ``SUMMARY :`` is learned."""
        ids = self._encode(texts)
        start = (ids == self._id("SUMMARY")).argmax(1)[:, None] + 2
        learned = (np.arange(ids.shape[1]) >= start) & (ids != self._tokenizer.pad_token_id)
        return torch.from_numpy(ids), torch.from_numpy(np.where(learned, ids, -100))

    def pairs(self, texts: list[str]) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids, labels of both summaries' words and labels of the answers, each ``(batch, tokens)``."""
        ids = self._encode(texts)
        position = np.arange(ids.shape[1])
        first, end = (ids == self._id("A")).argmax(1)[:, None] + 2, (ids == self._id("which")).argmax(1)[:, None]
        written = (position >= first) & (position < end)
        answered = np.zeros_like(written)
        answered[:, 2:] = ids[:, :-2] == self._id("CHOICE")
        return torch.from_numpy(ids), *(torch.from_numpy(np.where(mask, ids, -100)) for mask in (written, answered))

    def _encode(self, texts: list[str]) -> np.ndarray:
        encoded = self._tokenizer(texts, padding=True, return_tensors="np", add_special_tokens=False)
        return encoded["input_ids"]


def step_loss(model: "LlamaForCausalLM", reader: Reader, rng: random.Random, pairs: bool) -> tuple[Tensor, ...]:
    """Losses of one step: words of written summaries and, with pairs, words of compared ones and answers."""
    ids, labels = reader.summaries([summary_text(rng) for _ in range(8 if pairs else 32)])
    writing = _cross_entropy(model(input_ids=ids).logits, labels)
    if not pairs:
        return (writing,)
    ids, read, answered = reader.pairs([pair_text(rng) for _ in range(24)])
    logits = model(input_ids=ids).logits
    return writing, _cross_entropy(logits, read), _cross_entropy(logits, answered)


def pretrain(schedule: Schedule, seed: int, report_every: int = 100) -> "tuple[LlamaForCausalLM, PreTrainedTokenizerFast]":
    """Trains the model from nothing; a function of its arguments on one machine."""
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, derive_seed(seed, "toy", "init")).train()
    reader, rng = Reader(tokenizer), random.Random(derive_seed(seed, "toy", "pretrain"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=schedule.lr, betas=(0.9, 0.98), weight_decay=0.05)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _warmup_cosine(step, schedule.steps))
    start = time.perf_counter()
    for step in range(schedule.steps):
        losses = step_loss(model, reader, rng, pairs=step >= schedule.writing_steps)
        optimizer.zero_grad()
        sum(losses, torch.zeros(())).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        if step % report_every == 0:
            shown = " ".join(f"{loss.item():.3f}" for loss in losses)
            print(f"step {step}: writing, reading, answers {shown} ({time.perf_counter() - start:.0f} s)", flush=True)
    return model.eval(), tokenizer


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for the model and its tokenizer")
    parser.add_argument("--steps", type=int, default=Schedule().steps)
    parser.add_argument("--lr", type=float, default=Schedule().lr)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    model, tokenizer = pretrain(Schedule(steps=arguments.steps, lr=arguments.lr), arguments.seed)
    model.save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)


def _words_of_the_world() -> list[str]:
    templates = world.GENERATION_TEMPLATE + world.CHOICE_TEMPLATE + " ".join(QUESTIONS) + "which names A B ."
    for field in ("{prompt}", "{response_a}", "{response_b}"):
        templates = templates.replace(field, " ")
    spoken = [*world.NAMES, *world.VERBS, *world.OBJECTS, *world.POLITE, *world.RUDE, *world.FILLERS]
    return list(dict.fromkeys([*templates.replace(":", " : ").split(), *spoken]))


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def _warmup_cosine(step: int, steps: int, warmup: int = 200) -> float:
    progress = min(1.0, max(0, step - warmup) / max(1, steps - warmup))
    return min(1.0, (step + 1) / warmup) * 0.5 * (1 + float(np.cos(np.pi * progress)))


if __name__ == "__main__":
    main()
