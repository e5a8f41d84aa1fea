"""Time of training, validation and generation by batches that are measured on this machine; names work without one."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from fedlight.callbacks.progress.time_left import works_between_rounds
from fedlight.datamodules.instructions.augmentation import Augmentation
from fedlight.datamodules.synthesis.datamodule import SyntheticInstructionDataModule
from fedlight.devices import hardware
from fedlight.devices.hardware import choose_device
from fedlight.lightning_cli.class_names import class_of
from fedlight.plan.plan import build
from fedlight.preflight.finding import Finding, State, ok, unknown
from fedlight.preflight.machine import memory_of
from fedlight.preflight.memory import Training, announce, check_time
from fedlight.preflight.sources import is_local
from fedlight.preflight.stages import ParsedStage, parts_of, settings_of
from fedlight.pretrained.hub import find_model
from fedlight.support.words import in_largest_unit

GENERATION = "generation of "
TIMED_TEXTS, TIMED_STEPS = 8, 16  # texts of a timed generation, and its tokens after the first
OWN_ROWS = (Augmentation, SyntheticInstructionDataModule)
"""Classes that make or choose rows by a model before a training or its rounds."""
WIDEST = 4
"""Bytes of a number in memory over those in a file of 8 bits, the narrowest that is read; of 16 bits it is half of that."""


def check_durations(parsed: Sequence[ParsedStage], trained: Sequence[Training]) -> list[Finding]:
    """Return findings with the time of training, validation and generation by models that are here; name untimed work."""
    rates: dict[str, tuple[float, float]] = {}
    findings = check_time(trained)
    generated = [_generates(item, rates) for item in parsed if _writes(item)]
    timed = {name for training in trained if training.is_timed for name in training.steps}
    timed |= {finding.what.removeprefix(GENERATION) for finding in generated if finding.state is State.OK}
    findings += check_validation(parsed, trained) + generated
    return findings + _left_out(parsed, timed) if timed else findings


def check_validation(parsed: Sequence[ParsedStage], trained: Sequence[Training]) -> list[Finding]:
    """Return a finding for each training of a model that was timed and is validated."""
    by_stage = {name: training for training in trained for name in training.steps if training.is_timed}
    timed = [item for item in parsed if item.stage.name in by_stage]
    return [
        _validates(item, by_stage[item.stage.name], rounds)
        for item in timed
        if (rounds := validations_of(item.config))
    ]


def validations_of(config: Mapping[str, Any]) -> int:
    """Return how often a run validates, 0 where it has no rows for it.

    Examples:
        >>> trainer = {"max_epochs": 9, "check_val_every_n_epoch": 2, "limit_val_batches": 1.0}
        >>> validations_of({"trainer": trainer, "data": {"init_args": {"split": {"val_share": 0.1}}}})
        4
        >>> validations_of({"trainer": trainer, "data": {"init_args": {"split": {"val_share": 0.0, "val_source": None}}}})
        0
    """
    trainer, data = config["trainer"], settings_of(config, "data")
    rounds, every = trainer.get("max_epochs") or 0, trainer.get("check_val_every_n_epoch") or 1
    split: Any = data.get("split")
    split = split if isinstance(split, dict) else {}
    has_rows = split.get("val_share", 1) or split.get("val_source")
    return max(rounds, 0) // every if has_rows and trainer.get("limit_val_batches") != 0 else 0


def _validates(parsed: ParsedStage, training: Training, rounds: int) -> Finding:
    work, size = training.work, settings_of(parsed.config, "data").get("eval_batch_size") or 1
    shape = replace(work.shape, examples=size, responses=work.shape.responses * size // work.shape.examples)
    # Seconds of a timed batch, by the operations of a forward pass over those of a training step.
    share = work.meter.forward_cost(shape).flops / work.meter.cost(work.shape).flops
    seconds, limit = share * training.batch_seconds, parsed.config["trainer"].get("limit_val_batches")
    each = f"batches of {size} examples, at most {in_largest_unit(seconds)} each"
    # A share of the batches, a float, gives no number; True is an int.
    if isinstance(limit, int) and not isinstance(limit, bool):
        each = f"at most {limit} {each}, {in_largest_unit(rounds * limit * seconds)} in all"
    return ok(f"validation of {parsed.stage.name}", f"{rounds} times {each}")


def _generates(parsed: ParsedStage, rates: dict[str, tuple[float, float]]) -> Finding:
    """Return the finding of a stage, with ``rates`` of models that were measured before."""
    options, data = (settings_of(parsed.config, part) for part in ("model", "data"))
    what, model = f"{GENERATION}{parsed.stage.name}", options["model"]
    texts, new = data["limit"] * options["completions"]["number"], options["completions"]["max_new_tokens"]
    said = f"at most {texts * new:,} tokens, {texts:,} texts of {new}"
    folder = Path(find_model(model))
    files = [folder] if folder.is_file() else [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
    if WIDEST * sum(file.stat().st_size for file in files) > memory_of(hardware.has_cuda()).size:
        return unknown(what, f"{said}; not timed, as {model} may be too large for this machine")
    key = str([options.get(name) for name in ("model", "base", "dtype")] + [data["max_tokens"]])
    if key not in rates:
        announce(f"time of generation by {model}: two short generations")
        try:
            cuda = hardware.has_cuda() and parsed.config["trainer"]["accelerator"] in ("auto", "gpu", "cuda")
            rates[key] = generation_seconds(parsed.namespace, data["max_tokens"], cuda)
        except (ValueError, OSError, RuntimeError) as error:
            return unknown(what, str(error))
    prompt, token = rates[key]
    seconds = texts * (prompt + new * token)
    return ok(what, f"{said}: at most {in_largest_unit(seconds)} at {1 / token:,.0f} tokens/s, measured here")


def generation_seconds(config: Any, prompt_tokens: int, cuda: bool = False) -> tuple[float, float]:
    """Return the seconds of a prompt, and of each new token of one text, by two short generations of some texts.

    The model is on this machine; its adapter may not exist yet.
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


def _writes(parsed: ParsedStage) -> bool:
    """Return whether a stage completes a known number of prompts with a model that is here."""
    if parsed.stage.command != "predict" or parsed.stage.is_done or parsed.namespace is None:
        return False
    options, data = (settings_of(parsed.config, part) for part in ("model", "data"))
    return bool(data.get("limit")) and "completions" in options and is_local(options["model"])


def _left_out(parsed: Sequence[ParsedStage], timed: Collection[str]) -> list[Finding]:
    """Return one finding with the stages without a forecast and what trainings do between rounds, or none."""
    waiting = [item for item in parsed if not item.stage.is_done]
    commands = [item.stage for item in waiting if item.namespace is not None and item.stage.name not in timed]
    parts = [f"{stage.name} ({stage.command})" for stage in commands]
    if functions := sum(item.stage.command == "call" for item in waiting):
        parts.append(f"functions: {functions}")
    fits = [parts_of(item.config) for item in waiting if item.stage.command == "fit"]
    # What works between a training's batches: scores, attacks, what makes or chooses rows.
    kinds = dict.fromkeys(class_of(path) for path, _ in chain.from_iterable(fits))
    parts += [
        kind.__name__
        for kind in kinds
        if kind is not None and (works_between_rounds(kind) or issubclass(kind, OWN_ROWS))
    ]
    return [ok("time that is not counted", ", ".join(parts))] if parts else []
