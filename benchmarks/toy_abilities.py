"""Measures of the tiny language model's abilities: ``python benchmarks/toy_abilities.py [FOLDER] [--json FILE]``.

Reading: the share of right answers to each neutral question on new pairs. Writing: the share of true facts in sampled
summaries, and how much the samples of one post differ.
"""

import argparse
import random
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from shown_rows import show
from toy_exercises import BETTER, QUESTIONS, answers, name_questions

from fedlight.support.seeding import derive_seed
from fedlight.toy import MODEL, world

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

MAX_NEW_TOKENS = 24


def reading(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerFast", num_pairs: int = 1000, seed: int = 0
) -> dict[str, float]:
    """Return the accuracy of each question of `QUESTIONS`, and of one "which names" question per pair that has an answer."""
    rng = random.Random(derive_seed(seed, "toy", "reading"))
    asked: dict[str, list[tuple[str, str]]] = {question: [] for question in [*QUESTIONS, "which names ... ?"]}
    for _ in range(num_pairs):
        post = world.draw_post(rng)
        a, b = world.draw_summary(rng, post), world.draw_summary(rng, post)
        filled = world.CHOICE_TEMPLATE.format(prompt=post, response_a=a, response_b=b)
        for question, answer in answers(world.measure(post, a), world.measure(post, b)).items():
            asked[question].append((filled.replace(BETTER, question), answer))
        for question, answer in sorted(name_questions(a, b).items())[:1]:
            asked["which names ... ?"].append((filled.replace(BETTER, question), answer))
    return {question: _share_right(model, tokenizer, cases) for question, cases in asked.items()}


def write(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerFast",
    posts: list[str],
    samples: int,
    temperature: float = 0.7,
) -> list[list[str]]:
    """Return ``samples`` sampled summaries of every post; uses torch's global random state."""
    tokenizer.padding_side = "left"  # the answer follows the last token
    prompts = [world.GENERATION_TEMPLATE.format(prompt=post) for post in posts]
    batch = tokenizer(prompts, padding=True, return_tensors="pt", return_token_type_ids=False)
    # top_k=0: by default transformers draws from the best 50 alone.
    settings = {"do_sample": True, "temperature": temperature, "top_k": 0, "num_return_sequences": samples}
    with torch.no_grad():
        ids = model.generate(**batch, max_new_tokens=MAX_NEW_TOKENS, **settings)
    texts = tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return [texts[start : start + samples] for start in range(0, len(texts), samples)]


def writing(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerFast", num_posts: int = 250, seed: int = 0
) -> dict[str, float]:
    """Return means over four samples at temperature 0.7 of new posts: each trait, and the share of facts that are true."""
    rng = random.Random(derive_seed(seed, "toy", "writing"))
    posts = [world.draw_post(rng) for _ in range(num_posts)]
    torch.manual_seed(seed)
    texts = write(model, tokenizer, posts, samples=4)
    seen = [world.measure(post, text) for post, group in zip(posts, texts, strict=True) for text in group]
    means = {name: sum(getattr(traits, name) for traits in seen) / len(seen) for name in world.Traits._fields}
    distinct = sum(len(set(group)) for group in texts) / len(texts)
    return {
        "true_share": means["covered"] / (means["covered"] + means["invented"]),
        "distinct_of_4": distinct,
        **means,
    }


def main() -> None:
    """Run the command line."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=MODEL)
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    folder = options.folder
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder).eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    abilities = writing(model, tokenizer) | reading(model, tokenizer)
    show([{"ability": name, "value": value} for name, value in abilities.items()], options.json)


def _share_right(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerFast", cases: list[tuple[str, str]]
) -> float:
    tokenizer.padding_side = "left"  # the answer follows the last token
    letters = torch.tensor(tokenizer.convert_tokens_to_ids(["A", "B"]))
    right = 0
    for start in range(0, len(cases), 250):
        texts, truth = zip(*cases[start : start + 250], strict=True)
        batch = tokenizer(list(texts), padding=True, return_tensors="pt", return_token_type_ids=False)
        with torch.no_grad():
            chosen = model(**batch).logits[:, -1, letters].argmax(-1)  # [batch, 2]
        right += sum("AB"[index] == letter for index, letter in zip(chosen.tolist(), truth, strict=True))
    return right / max(1, len(cases))


if __name__ == "__main__":
    main()
