"""Plan of a run: which devices could take part, and their costs of a visit, from the config alone.

Nothing is downloaded, read or trained: the module is built without weights, and the operations and memory of a training step
are counted for a full batch of the longest texts that the config allows. A device that fits here fits the run.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from jsonargparse import Namespace
from lightning import LightningModule
from torch import nn

from fedlight.callbacks.loop.federated_loop import FederatedLoop
from fedlight.callbacks.loop.plan import visit_lengths
from fedlight.conf import path as conf_path
from fedlight.datamodules.federated.rounds import batches_in_pass
from fedlight.devices.cost import CostMeter
from fedlight.devices.device import Device, known_devices, load_device
from fedlight.devices.forecast import Plan, Workload, forecast_at_largest, remedies
from fedlight.devices.memory import moment_bytes_per_weight
from fedlight.devices.shape import BatchShape
from fedlight.federation.algorithms.lora.unlike_ranks import UnlikeRanks
from fedlight.federation.client import Client
from fedlight.federation.forward.zeroth_order import ZerothOrder
from fedlight.federation.lora.ranks import largest_rank
from fedlight.federation.payloads import predict_payloads
from fedlight.lightning_cli.cli import OneLineParser, ReadSettings, find_config
from fedlight.modules.dpo import DPOModule
from fedlight.modules.language.adapters import trained_parameters
from fedlight.modules.language.module import LanguageModule
from fedlight.modules.language.optimizers import make_optimizer
from fedlight.plan.shapes import known_shapes
from fedlight.support.checks import check_range


def make_plan(arguments: Sequence[str], shape: str | None = None, examples: int | None = None) -> Plan:
    """Forecast the visits of a run on each device, by arguments of ``fedlight fit``.

    ``shape`` is the name of a folder of ``conf/shapes``, whose architecture replaces the model, and ``examples`` the number
    of a client's, where a visit is one pass over its data.

    Raises:
        ValueError: a setting is missing or out of range, or the module is not derived from LanguageModule.
    """
    if examples is not None and examples < 1:
        raise ValueError(f"--examples {examples}: a client has one or more")
    if shape is not None and shape not in known_shapes():
        known = ", ".join(known_shapes())
        raise ValueError(f"--shape {shape}: there is no such architecture; there are {known}")
    config = ReadSettings(["fit", *map(find_config, arguments)]).config["fit"]
    if shape is not None:  # an adapter in the config is of another model
        other = {"model": str(conf_path(f"shapes/{shape}")), "adapter": None, "merge_adapter": False}
        for key, value in other.items():
            config[f"model.init_args.{key}"] = value
    loop, work, settings = workload(config, examples)
    settings = {**settings, "model": shape or settings["model"]}
    devices, shares = [load_device(name) for name in known_devices()], {}
    if loop.fleet is not None and loop.fleet.devices:
        devices, shares = list(loop.fleet.devices.values()), loop.fleet.weights
    if isinstance(ranks := getattr(loop.algorithm, "ranks", None), dict):
        settings["ranks_of_no_device"] = sorted({*ranks} - {device.name for device in devices})
    works = works_by_device(loop, work, devices, partial(workload, config, examples))
    deadline = settings["deadline_seconds"]
    forecasts = [forecast_at_largest(device, works[device.name], deadline) for device in devices]
    helped = {f.device.name: remedies(f.device, work) for f, work in forecasts if f.reason == "out_of_memory"}
    # At 4 bits the base is smallest.
    return Plan(settings, shares, [f for f, _ in forecasts], helped, work.resting(4).base_bytes)


def works_by_device(
    loop: FederatedLoop, work: Workload, devices: Sequence[Device], at_rank: Callable[[int], tuple[Any, ...]]
) -> dict[str, list[Workload]]:
    """Return device -> the work of a visit with each LoRA rank that its clients may have.

    ``work`` has the rank of the module; ``at_rank`` is a function from a rank to the result of `workload` with it. Ranks of
    single clients are left out: the data that name the clients are not read.
    """
    if not isinstance(loop.algorithm, UnlikeRanks):
        return {device.name: [work] for device in devices}
    parameters = dict(work.meter.module.named_parameters())
    ranks, largest = loop.algorithm.ranks, largest_rank(parameters, loop.algorithm.ranks)
    if isinstance(ranks, list):
        by_device = {device.name: ranks for device in devices}
    else:
        by_device = {device.name: [(ranks or {}).get(device.name, largest)] for device in devices}
    every = {rank: at_rank(rank)[1] for rank in {rank for some in by_device.values() for rank in some}}
    return {name: [every[rank] for rank in some] for name, some in by_device.items()}


def workload(
    config: Any, examples: int | None = None, lora_rank: int | None = None
) -> tuple[FederatedLoop, Workload, dict[str, Any]]:
    """Return the loop, the work of a visit, counted without weights, and the settings that the work follows from.

    ``examples`` are those of a client, where a visit is one pass over its data, and ``lora_rank`` is its rank, else the
    module's. Raises ValueError where a setting is missing, or the module is not derived from LanguageModule.
    """
    module, loop = build(config)
    if not isinstance(module, LanguageModule):
        raise ValueError(
            f"model={type(module).__name__}: a plan needs a module of which a skeleton can be made: derive it from "
            "LanguageModule"
        )
    tokens, batch_size = (_setting(config, key) for key in ("max_tokens", "batch_size"))
    if loop.local_steps is None:
        if examples is None:
            raise ValueError(
                "federated.local_steps is not set, so a visit is one pass over a client's data: say how many examples "
                "that are, --examples N"
            )
        batch_size = min(batch_size, examples)
    # The last batch of a pass may be short, and counts as a full one.
    one_pass = batches_in_pass(examples or 0, batch_size)
    accumulation = config.trainer.accumulate_grad_batches
    lengths = visit_lengths(loop.local_steps, accumulation, lambda _, split="train": one_pass)
    texts = 2 if isinstance(module, DPOModule) else 1  # the chosen and the rejected answer
    # No position predicts the first token.
    shape = BatchShape(batch_size, tokens, texts * batch_size * (tokens - 1))
    meter = CostMeter(module, lora_rank=lora_rank)
    whole: Any = meter.module if lora_rank is None else module.skeleton()
    others = {*whole.adapter_names[1:]}  # a visit trains one adapter, and several are equally large
    trained = trained_parameters(whole)
    state: dict[str, torch.Tensor] = {
        key: weight for key, weight in trained.items() if not others & {*key.split(".")}
    }
    client = Client("client", 1, 1.0, lora_rank=lora_rank)
    visits = loop.algorithm.plan(0, [client], lengths)
    perturbations = (loop.forward or ZerothOrder()).perturbations
    gone = 0.0 if loop.train == "backprop" else perturbations / accumulation
    sent, later = (
        # A client may receive more at its first visit.
        predict_payloads(loop.algorithm, visits, client, state, gone, again)
        for again in (False, True)
    )
    options = module.options
    name, args = options.optimizer["name"], options.optimizer["args"] or {}
    # For a single number: its moments are counted for each weight.
    optimizer = make_optimizer(name, [nn.Parameter(torch.zeros(1))], options.lr, args)
    # The visit that trains most takes most memory.
    starts = [message.start for message in sent]
    trains = max(starts, key=lambda start: sum(value.numel() for value in start.values()))
    work = Workload(
        meter,
        set(trains),
        moment_bytes_per_weight(optimizer),
        shape,
        sum(visit.num_batches for visit in visits),
        sum(loop.channel.down_bytes(message.down) for message in sent),
        sum(loop.channel.up_bytes(message.up) for message in sent),
        lora_rank,
        loop.train,
        perturbations,
    )
    settings = {
        "model": options.model,
        "module": type(module).__name__,
        "batch_size": batch_size,
        "max_tokens": tokens,
        "batches": work.num_batches,
        "optimizer": name,
        "trained_parameters": sum(weight.numel() for weight in state.values()),
        "frozen_parameters": sum(w.numel() for w in meter.module.parameters() if not w.requires_grad),
        "deadline_seconds": None if loop.fleet is None else loop.fleet.deadline_seconds,
        "train": loop.train,
        "later_bytes_down": sum(loop.channel.down_bytes(message.down) for message in later),
    }
    return loop, work, settings


def build(config: Any) -> tuple[Any, FederatedLoop]:
    """Return the module, not loaded, and the loop, with its defaults if the config has no ``federated``."""
    parser = OneLineParser(parser_mode="omegaconf+")
    kinds: dict[str, Any] = {"model": LightningModule, "federated": FederatedLoop}
    for part, kind in kinds.items():
        parser.add_lightning_class_args(kind, part, subclass_mode=True, required=part == "model")
    # Parsed already, by the same types: a second time would take longer than the first.
    made = parser.instantiate(Namespace({part: config.get(part) for part in kinds}))
    return made["model"], made.get("federated") or FederatedLoop()


def _setting(config: Any, key: str) -> int:
    value = config.get(f"data.init_args.{key}")
    if not isinstance(value, int):
        raise ValueError(f"data.{key} is not set: a plan needs it, since it is made without the data")
    check_range(f"data.{key}", value, 1, math.inf)
    return value
