"""Duration of a training on this machine: a step is timed, on two batches, and the steps of all rounds are counted."""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from fedlight.devices.forecast import Workload
from fedlight.devices.hardware import choose_device
from fedlight.plan.plan import build

TIMED_TEXTS, TIMED_STEPS = 8, 16  # texts of a timed generation, and its tokens after the first

TIMED_TOKENS = 1024
"""Most tokens of a timed batch, if that is one text or more; a larger batch takes longer by its operations."""


def step_seconds(config: Any, work: Workload, cuda: bool = False) -> float:
    """Return the seconds of a training step, forward and backward, on a batch of the longest texts; the model is loaded.

    Args:
        config: parsed settings of ``fedlight fit``; the model is on this machine.
        work: work of a visit, for the size of a batch.
        cuda: whether to train on the GPU.
    """
    shape = work.shape
    examples = min(shape.examples, max(1, TIMED_TOKENS // max(1, shape.tokens)))
    part = replace(shape, examples=examples, responses=shape.responses * examples // shape.examples)
    module, _ = build(config)
    seconds = 0.0
    with choose_device("cuda" if cuda else "cpu"), torch.random.fork_rng(), torch.enable_grad():
        module.configure_model()
        batch = module.train().sketch_batch(part)
        for _ in range(2):  # the second counts: the first one fills caches
            start = time.perf_counter()
            module.sketch_losses(batch).mean().backward()
            if cuda:
                torch.cuda.synchronize()  # backward returns before its kernels have run
            seconds = time.perf_counter() - start
    # From the timed part to a whole batch, by their operations.
    return seconds * work.meter.cost(shape).flops / work.meter.cost(part).flops


def generation_seconds(config: Any, prompt_tokens: int, cuda: bool = False) -> tuple[float, float]:
    """Return the seconds of a prompt, and of each new token of one text, by two short generations of some texts.

    Args:
        config: parsed settings of ``fedlight predict``; the model is on this machine. Its adapter may not exist yet.
        prompt_tokens: most tokens of a prompt.
        cuda: whether to generate on the GPU.
    """
    parsed = config.clone()
    parsed["model.init_args.adapter"] = None
    parsed["model.init_args.merge_adapter"] = False
    module, _ = build(parsed)
    seconds, longest = [], 1
    with choose_device("cuda" if cuda else "cpu"), torch.no_grad():
        module.configure_model()
        module.eval()
        ids = module.tokenizer(" the" * prompt_tokens, add_special_tokens=False)["input_ids"]
        prompts = [module.tokenizer.decode(ids[: max(1, prompt_tokens - 1)])] * TIMED_TEXTS
        # The first writes one token and fills caches, so a prompt takes no longer than it does there.
        for tokens in (1, 1 + TIMED_STEPS):
            start = time.perf_counter()
            texts = module.generate(prompts, temperature=1.0, max_new_tokens=tokens)
            seconds.append(time.perf_counter() - start)
            # The model may end its texts before; a batch goes on as long as its longest text.
            longest = max(len(module.tokenizer(text)["input_ids"]) for [text] in texts)
    new = max(seconds[1] - seconds[0], 0.0) / max(1, min(longest, 1 + TIMED_STEPS) - 1)
    return seconds[0] / TIMED_TEXTS, new / TIMED_TEXTS


def steps_of(config: Mapping[str, Any]) -> int | None:
    """Return the batches of a federated run with all its clients; None where that depends on the data.

    Examples:
        >>> loop = {"init_args": {"local_steps": 5, "clients_per_round": 4}}
        >>> steps_of({"trainer": {"max_epochs": 3, "accumulate_grad_batches": 2}, "federated": loop})
        120
    """
    trainer, loop = config["trainer"], (config.get("federated") or {}).get("init_args") or {}
    factors = (trainer.get("max_epochs"), loop.get("local_steps"), loop.get("clients_per_round"))
    if not all(isinstance(factor, int) and factor > 0 for factor in factors):
        return None
    rounds, steps, clients = factors
    return rounds * steps * clients * (trainer.get("accumulate_grad_batches") or 1)
