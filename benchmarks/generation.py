"""Speed of a module's completions against transformers' ``generate`` on the same base, greedy, by turns in one run.

``fresh`` is a module with an adapter that is not trained yet, ``tuned`` one with a trained adapter, ``peft`` the same
adapter under PEFT's own layers and transformers' ``generate``. All write the same number of tokens. Seconds are medians of
CPU time; the ratio is the speed against ``transformers``. ``same`` says whether ``fresh`` writes what ``transformers`` does.

Run: OMP_NUM_THREADS=1 python benchmarks/generation.py [--model smollm2-135m-instruct] [--dtype bf16] [--json FILE]
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import Linear
from shown_rows import show

from fedlight.modules.language.base_model import load_base
from fedlight.modules.language.generation import encode_prompts, pad_left
from fedlight.modules.sft import SFTModule
from fedlight.stacking.fast_layers import FusedLora

TOPICS = (
    "three rivers",
    "two poets",
    "five tools",
    "four birds",
    "six games",
    "ten trees",
    "a lake",
    "some bread",
)
PROMPT = "Below is a task.\n\n### Instruction:\nDescribe {topic} in a few sentences.\n\n### Response:"
SMALL = 1e-3


def plain_generate(model: Any, tokenizer: Any, prompts: Sequence[str], tokens: int) -> list[list[int]]:
    """Complete prompts greedily by ``generate`` alone."""
    from transformers import GenerationConfig

    inputs = pad_left(encode_prompts(tokenizer, prompts), tokenizer.pad_token_id)
    config = GenerationConfig(
        max_new_tokens=tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id, eos_token_id=None
    )
    with torch.no_grad():
        written = model.generate(**inputs, generation_config=config)
    return written[:, inputs["input_ids"].shape[1] :].tolist()


def make_module(options: argparse.Namespace, tuned: bool) -> SFTModule:
    """A module for inference that never ends a text, with B other than 0 where ``tuned``."""
    module = SFTModule(options.model, dtype=options.dtype)
    module.configure_model()
    module.eval()
    module.tokenizer.eos_token, module.tokenizer.chat_template = None, None
    module.causal_lm.generation_config.eos_token_id = None
    if tuned:
        with torch.no_grad():
            for name, weight in module.state_dict().items():
                weight += SMALL if "lora_B" in name else 0
    return module


def measure(options: argparse.Namespace, number: int) -> dict[str, Any]:
    """Tokens for each CPU second by every way, and their ratios, for a batch of ``number`` prompts."""
    fresh, tuned, peft = (make_module(options, is_tuned) for is_tuned in (False, True, True))
    for layer in peft.network.modules():
        if type(layer) is FusedLora:
            layer.__class__ = Linear
    base, _ = load_base(options.model, base="plain", dtype=options.dtype, trust_remote_code=False)
    base.eval().generation_config.eos_token_id = None
    prompts = [PROMPT.format(topic=topic) for topic in TOPICS[:number]]
    tokens = options.new_tokens

    def written(module: SFTModule) -> Any:
        return module.generate(prompts, temperature=0.0, max_new_tokens=tokens)

    ways: dict[str, Callable[[], Any]] = {
        "transformers": lambda: plain_generate(base, fresh.tokenizer, prompts, tokens),
        "fresh": lambda: written(fresh),
        "tuned": lambda: written(tuned),
        "peft": lambda: plain_generate(peft.causal_lm, fresh.tokenizer, prompts, tokens),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    found: dict[str, Any] = {}
    for _ in range(options.repeats):
        for way, write in ways.items():
            start = time.process_time()
            found[way] = write()
            seconds[way].append(time.process_time() - start)
    median = {way: statistics.median(own) for way, own in seconds.items()}
    texts = fresh.tokenizer.batch_decode(found["transformers"], skip_special_tokens=True)
    return {
        "prompts": number,
        "tokens_per_second": {way: number * tokens / own for way, own in median.items()},
        "fresh": median["transformers"] / median["fresh"],
        "tuned_to_peft": median["peft"] / median["tuned"],
        "same": [text.strip() for text in texts] == [one for (one,) in found["fresh"]],
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the speeds for one prompt and for a batch."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="toy", help="name, or a folder")
    parser.add_argument("--dtype", default="fp32")
    for name, value in {"new_tokens": 32, "repeats": 3, "batch": len(TOPICS)}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--json", type=Path, help="writes the figures to this file")
    options = parser.parse_args(argv)
    rows = [measure(options, number) for number in (1, options.batch)]
    show(rows, options.json)


if __name__ == "__main__":
    main()
