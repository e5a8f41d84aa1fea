"""Memory checks: does each training fit into this machine, and into the devices of its fleet?

Memory is counted on shapes, without weights. Base, adapter, gradients and moments follow from the model's config and the
settings; activations are those of a batch of the longest texts that the settings allow, so most batches take less. How near
this comes to the peak of a process on a CPU is measured by ``benchmarks/memory_forecast.py``.
"""

import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from fedlight.conf import path as conf_path
from fedlight.devices import hardware
from fedlight.devices.cost import CostMeter
from fedlight.devices.forecast import Workload, forecast_at_largest
from fedlight.devices.hardware import choose_device
from fedlight.devices.measure.number_type import choose_dtype
from fedlight.devices.memory import Footprint, forward_only
from fedlight.lightning_cli.class_names import class_of
from fedlight.modules.language.base_model import read_config, width_of
from fedlight.modules.language.module import LanguageModule
from fedlight.plan.plan import build, workload, works_by_device
from fedlight.preflight.finding import Finding, ok, problem, unknown
from fedlight.preflight.machine import MachineMemory, memory_of, size_text
from fedlight.preflight.sources import is_local
from fedlight.preflight.stages import ParsedStage, settings_of
from fedlight.recipes.steps import merge_adapter
from fedlight.support.words import in_largest_unit

SHAPES = {
    "Qwen/Qwen2-0.5B": "qwen2_0.5b",
    "google/gemma-2b": "gemma_2b",
    "meta-llama/Llama-2-7b-hf": "llama2_7b",
    "meta-llama/Meta-Llama-3-8B": "llama3_8b",
}
"""Models of the papers -> their architecture in ``conf/shapes``, for which no hub is needed."""
BITS = {"int8": 8, "nf4": 4}
PROCESS_BYTES, WORD_BYTES = 530_000_000, 1250
"""Memory of Python, torch, transformers and PEFT, once imported, and of each word of a tokenizer."""
KEPT = {"plain": 1.1, "int8": 1.35, "nf4": 1.35}
"""Memory of activations on a CPU over their bytes: the C library keeps freed tensors below 32 MiB between living ones, and
where a base is quantized each of its layers is unpacked for a moment."""
TIMED_TOKENS = 1024
"""Most tokens of a timed batch, if that is one text or more; a larger batch takes longer by its operations."""
MOST_TEXTS = 0.5
"""A batch that fits at this share of the longest texts may fit in practice: a finding of "unknown", not of a problem."""


@dataclass(frozen=True)
class Training:
    """A stage that trains a language model."""

    name: str
    model: str  # hub name or folder of its model
    base: str  # ``plain``, ``int8`` or ``nf4``
    work: Workload  # a visit's work
    # device of the fleet -> a visit's work with each LoRA rank that its clients may have
    by_device: Mapping[str, Sequence[Workload]]
    loop: Any  # the federated loop, with its fleet, if any
    settings: dict[str, Any]  # settings that ``work`` follows from
    number_bytes: int  # bytes of a number of an unquantized base
    cuda: bool  # whether it runs on a GPU
    config: Any  # its parsed settings
    # stages of this kind -> batches of all rounds and clients, None where that depends on the data
    steps: dict[str, int | None] = field(default_factory=dict)

    @cached_property
    def at_rest(self) -> Footprint:
        """Memory without activations."""
        # Cached, since it is counted layer by layer.
        return self.work.resting(BITS.get(self.base, 16), self.number_bytes)

    @property
    def texts(self) -> int:
        """Texts of a batch: two of each pair of answers."""
        module: Any = self.work.meter.module
        batch = module.sketch_batch(self.work.shape)
        # A batch of pairs has a map for each of the two answers.
        sides = [batch] if "input_ids" in batch else batch.values()
        return sum(len(side["input_ids"]) for side in sides)

    @property
    def process_bytes(self) -> int:
        """Bytes of this machine's memory for libraries and tokenizer; 0 of a GPU's."""
        module: Any = self.work.meter.module
        words: int = module.causal_lm.config.get_text_config().vocab_size
        return 0 if self.cuda else PROCESS_BYTES + WORD_BYTES * words

    @property
    def trained_bytes(self) -> int:
        """Bytes of adapter, gradients and moments; without gradients those of the adapter and its copy."""
        rest = forward_only(self.at_rest) if self.work.train == "forward" else self.at_rest
        return rest.adapter_bytes + rest.gradient_bytes + rest.moment_bytes

    @cached_property
    def activation_bytes(self) -> int:
        """Bytes of the activations of a batch of the longest texts, counted in the base's number type."""
        meter, shape = self.work.meter, self.work.shape
        cost = meter.forward_cost(shape) if self.work.train == "forward" else meter.cost(shape)
        return cost.activation_bytes if self.cuda else round(KEPT[self.base] * cost.activation_bytes)

    @cached_property
    def batch_seconds(self) -> float:
        """Seconds of a step on a batch of the longest texts; the model is loaded for it.

        Raises:
            OSError: the model cannot be read.
            RuntimeError: memory is short, as on a GPU that others use.
            ValueError: the model or its task cannot be used.
        """
        announce(f"time of {self.settings['module']} on {self.model}: two batches")
        return step_seconds(self.config, self.work, self.cuda)

    @property
    def is_timed(self) -> bool:
        """Whether `batch_seconds` has been measured."""
        return "batch_seconds" in self.__dict__  # where cached_property keeps its value

    @property
    def peak_bytes(self) -> int:
        """Bytes at the peak of the process, or of the GPU."""
        return self.process_bytes + self.at_rest.base_bytes + self.trained_bytes + self.activation_bytes


def trainings(
    stages: Sequence[ParsedStage], configs: Mapping[str, bytes]
) -> tuple[list[Training], list[Finding]]:
    """Return each kind of training once, and findings for those not counted; ``configs``: hub name -> ``config.json``."""
    kinds: dict[tuple[Any, ...], Training] = {}
    unknowns: dict[str, Finding] = {}
    merged = {
        config.get("output"): config["model"]
        for stage, config, _ in stages
        if stage.calls(merge_adapter) and "model" in config
    }
    for parsed in stages:
        if not _is_counted(parsed):
            continue
        model, data, loop = (settings_of(parsed.config, part) for part in ("model", "data", "federated"))
        base = model["model"]
        while base in merged:  # an adapter merged into its base has the base's shape
            base = merged[base]
        names = ("lora", "base", "dtype", "optimizer", "execution")
        key = (
            parsed.config["model"]["class_path"],
            base,
            *(str(model.get(name)) for name in names),  # as texts: maps cannot be in a key
            *(data.get(name) for name in ("batch_size", "max_tokens")),
            # Only a fleet's devices depend on the settings of a round; how clients train counts here, too.
            str(loop) if loop.get("fleet") else loop.get("train"),
        )
        try:
            if key not in kinds:
                kinds[key] = count_training(parsed.stage.name, parsed.namespace, base, configs)
        except (ValueError, OSError) as error:
            unknowns.setdefault(base, unknown(f"memory for {base}", str(error)))
        else:
            kinds[key].steps[parsed.stage.name] = steps_of(parsed.config)
    return list(kinds.values()), list(unknowns.values())


def check_memory(trained: Sequence[Training]) -> list[Finding]:
    """Return one finding for each kind of training, and one for each fleet."""
    here = {cuda: memory_of(cuda) for cuda in {training.cuda for training in trained}}
    findings = []
    for training in trained:
        findings.append(fits(training, here[training.cuda]))
        if training.loop.fleet is not None and training.by_device:
            findings.append(_fleet(training))
    # Kinds that differ in the loop alone have the same lines.
    return list(dict.fromkeys(findings))


def fits(training: Training, memory: MachineMemory) -> Finding:
    """Return the finding whether a training fits into a memory, part by part."""
    shape = training.settings
    what = f"memory of {shape['module']} on {training.model}"
    peak = training.peak_bytes
    resting = peak - training.activation_bytes
    trained = "a copy" if shape.get("train") == "forward" else "gradients and moments"
    parts = (
        f"{size_text(peak)} at the peak: libraries and tokenizer {size_text(training.process_bytes)}, base "
        f"{size_text(training.at_rest.base_bytes)}, adapter with {trained} "
        f"{size_text(training.trained_bytes)}, activations {size_text(training.activation_bytes)} for {training.texts} "
        f"texts of {shape['max_tokens']} tokens; {memory.words}"
    )
    if resting > memory.size:
        smaller = "a smaller model" if training.base == "nf4" else "base=nf4 (int8), a smaller model"
        return problem(what, f"{parts}: does not even hold the weights; take {smaller} or a larger machine")
    if peak <= memory.size:
        return ok(what, parts)
    # Activations grow with the examples, and at least as fast with the tokens.
    share = (memory.size - resting) / training.activation_bytes
    tokens, examples = int(share * shape["max_tokens"]), int(share * shape["batch_size"])
    smaller = f", or a batch_size of {examples}" if examples else ""
    detail = f"{parts}: that fits for texts of {tokens} tokens{smaller}; set these, or take a larger machine"
    # Most texts are shorter than the settings allow.
    return problem(what, detail) if share < MOST_TEXTS else unknown(what, detail)


def steps_of(config: Mapping[str, Any]) -> int | None:
    """Return the batches of a federated run with all its clients; None where that depends on the data.

    Examples:
        >>> loop = {"init_args": {"local_steps": 5, "clients_per_round": 4}}
        >>> steps_of({"trainer": {"max_epochs": 3, "accumulate_grad_batches": 2}, "federated": loop})
        120
    """
    trainer, loop = config["trainer"], settings_of(config, "federated")
    factors = (trainer.get("max_epochs"), loop.get("local_steps"), loop.get("clients_per_round"))
    if not all(isinstance(factor, int) and factor > 0 for factor in factors):
        return None
    rounds, steps, clients = factors
    return rounds * steps * clients * (trainer.get("accumulate_grad_batches") or 1)


def step_seconds(config: Any, work: Workload, cuda: bool = False) -> float:
    """Return the seconds of a training step, forward and backward, on a batch of the longest texts; the model is loaded."""
    shape = work.shape
    examples = min(shape.examples, max(1, TIMED_TOKENS // max(1, shape.tokens)))
    part = replace(shape, examples=examples, responses=shape.responses * examples // shape.examples)
    module, _ = build(config)
    seconds = 0.0
    devices = ["cuda"] if cuda else []
    with choose_device("cuda" if cuda else "cpu"), torch.random.fork_rng(devices), torch.enable_grad():
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


def check_time(trained: Sequence[Training]) -> list[Finding]:
    """Return a finding with tokens and seconds for each run of training whose model is here and fits."""
    here = [run for run in trained if is_local(run.model) and run.work.train != "forward"]
    return [takes(run) for run in here if run.peak_bytes <= memory_of(run.cuda).size]


def takes(training: Training) -> Finding:
    """Return the finding how long a training takes on this machine, by two of its batches."""
    shape = training.work.shape
    what = f"time of {training.settings['module']} on {training.model}"
    try:
        seconds = training.batch_seconds
    except (ValueError, OSError, RuntimeError) as error:
        return unknown(what, str(error))
    batch = f"a batch of {training.texts} texts of {shape.tokens} tokens"
    said = [f"{in_largest_unit(seconds)} for {batch}, measured here"]
    for name, steps in training.steps.items():
        if steps is None:
            said.append(f"{name}: as many batches as the data have")
            continue
        tokens = steps * training.texts * shape.tokens
        said.append(
            f"{name}: {steps:,} batches with at most {tokens:,} tokens, at most "
            f"{in_largest_unit(steps * seconds)} without validation"
        )
    return ok(what, "; ".join(said))


def announce(what: str) -> None:
    """Announce a slow measurement on standard error."""
    print(f"measuring {what}, up to a minute", file=sys.stderr, flush=True)


def _fleet(training: Training) -> Finding:
    fleet, works = training.loop.fleet, training.by_device
    forecasts = (
        forecast_at_largest(device, works[device.name], fleet.deadline_seconds)[0]
        for device in fleet.devices.values()
    )
    reasons = {forecast.device.name: forecast.reason for forecast in forecasts}
    out = [f"{name} ({reason.replace('_', ' ')})" for name, reason in reasons.items() if reason]
    what = f"fleet of {training.name}"
    named = ", ".join(out)
    if len(out) == len(reasons):
        return problem(what, f"no device can take part: {named}; `fedlight plan` says with what they could")
    able = f"{len(reasons) - len(out)} of {len(reasons)} devices can take part"
    return ok(what, able + (f"; not {named}" if out else ""))


def _is_counted(parsed: ParsedStage) -> bool:
    """Return whether a stage is still to train a language model."""
    if parsed.stage.command != "fit" or parsed.stage.is_done or parsed.namespace is None:
        return False
    kind = class_of(parsed.config["model"]["class_path"])
    return kind is not None and issubclass(kind, LanguageModule)


def count_training(name: str, namespace: Any, base: str, configs: Mapping[str, bytes]) -> Training:
    """Count a training on shapes; raise ValueError where the config of its base is not known, or a setting is missing."""
    config, parsed = namespace.as_dict(), namespace.clone()
    options = config["model"]["init_args"]
    # An adapter's weights do not exist yet, and its shape is the same; of several, equally large, one is trained at a time.
    for key, value in {"adapter": None, "merge_adapter": False, "num_adapters": 1}.items():
        if f"model.init_args.{key}" in parsed:
            parsed[f"model.init_args.{key}"] = value
    cuda = hardware.has_cuda() and config["trainer"]["accelerator"] in ("auto", "gpu", "cuda")
    with _shape(base, configs) as folder:
        width = width_of(read_config(folder))
        chosen = choose_dtype(options["dtype"], torch.device("cuda" if cuda else "cpu"), width)
        parsed["model.init_args.model"] = folder
        batch = settings_of(config, "data").get("batch_size")
        counted = partial(workload, parsed, batch if isinstance(batch, int) else 1)
        loop, work, settings = counted()
        module: Any = work.meter.module
        skeleton = module.skeleton(chosen.name)
        from fedlight.stacking.fast_layers import attend_in_fp32, use_fast_layers  # imports PEFT

        if not cuda and options["base"] == "plain":  # as on a base that is loaded here
            use_fast_layers(skeleton.network, skeleton.dropout_masks)
        elif not cuda:
            attend_in_fp32(skeleton.network)
        here = replace(work, meter=CostMeter(skeleton))
        devices = [] if loop.fleet is None else [*loop.fleet.devices.values()]
        works = works_by_device(loop, work, devices, lambda rank: counted(lora_rank=rank))
        size = chosen.dtype.itemsize
        training = Training(name, base, options["base"], here, works, loop, settings, size, cuda, parsed)
        training.activation_bytes  # noqa: B018 - counted while the config exists
    return training


@contextmanager
def _shape(model: str, configs: Mapping[str, bytes]) -> Iterator[str]:
    """Yield a folder with the model's config."""
    if is_local(model):
        yield model
    elif model in configs:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_bytes(configs[model])
            yield folder
    elif model in SHAPES:
        yield str(conf_path(f"shapes/{SHAPES[model]}"))
    else:
        raise ValueError("its config is not known, as the hub cannot be reached")
