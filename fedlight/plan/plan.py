"""Plan of a run: which devices could take part, and their costs of a visit, from the config alone.

Nothing is downloaded, read or trained: the module is built without weights, and the operations and memory of a training step
are counted for a full batch of the longest texts that the config allows. A device that fits here fits the run.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from jsonargparse import Namespace
from lightning import LightningModule
from rich.table import Table
from torch import nn

from fedlight.callbacks.loop.federated_loop import FederatedLoop
from fedlight.callbacks.loop.plan import visit_lengths
from fedlight.conf import path as conf_path
from fedlight.datamodules.federated.rounds import batches_in_pass
from fedlight.devices.cost import CostMeter
from fedlight.devices.device import Device, known_devices, load_device
from fedlight.devices.forecast import Forecast, Plan, Workload, forecast_at_largest, remedies
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
from fedlight.support.console import rich_table, wide_console
from fedlight.support.words import three_digits

GIB = 2**30
FITS = {"out_of_memory": "out of memory", "late": "yes, but late", "left": "yes, but leaves"}
FITS["never"] = "yes, but never there"
SIZES = ("base", "adapter", "gradients", "moments", "activations", "peak", "budget")
BATCH = "batches of {batch_size} texts of {max_tokens} tokens"


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


def show(plan: Plan) -> None:
    """Print the tables and the advice."""
    print(headline(plan.settings))
    wide_console(250).print(memory_table(plan), visit_table(plan))
    for line in advice(plan):
        print(line)


def headline(settings: dict[str, Any]) -> str:
    """Return the assumptions about a visit in one line, such as ``a visit is 5 batches of 32 texts of 128 tokens``."""
    millions = [f"{three_digits(settings[f'{part}_parameters'] / 1e6)} M" for part in ("frozen", "trained")]
    deadline = settings["deadline_seconds"]
    return (
        f"{settings['module']} on {settings['model']}: {millions[0]} weights frozen, {millions[1]} trained by "
        f"{settings['optimizer']}; a visit is {settings['batches']} {BATCH.format(**settings)}"
        + ("" if deadline is None else f", to be done in {three_digits(deadline)} s")
    )


def memory_table(plan: Plan) -> Table:
    """Return a table of the memory that a visit takes on each device, and how it was made to fit."""
    has_ranks = any(forecast.lora_rank is not None for forecast in plan.forecasts)
    rows = []
    for forecast in plan.forecasts:
        device, fit = forecast.device, forecast.fit
        row = {"device": device.name}
        if plan.shares:
            row["share"] = f"{plan.shares[device.name]:.0%}"
        row["fits"] = FITS.get(forecast.reason, "yes")
        if plan.settings["train"] != "backprop":  # how a device trains is a question only where it may differ
            row["train"] = ("forward" if fit.forward else "backprop") if fit.fits else "-"
        row["base bits"] = str(device.weight_bits)
        if has_ranks:
            row["LoRA rank"] = str(forecast.lora_rank)
        row |= {"micro-batch": str(fit.micro_batch), "checkpointing": "yes" if fit.checkpointing else "no"}
        sizes = [*asdict(fit.footprint).values(), fit.footprint.peak_bytes, device.budget_bytes]
        row |= {name: three_digits(size / GIB) for name, size in zip(SIZES, sizes, strict=True)}
        rows.append(row)
    return _table("Memory of a visit at its peak, in GiB", rows)


def visit_table(plan: Plan) -> Table:
    """Return a table of a visit's time, bytes and energy on each device, and of the visits that fit into a day."""
    names = ("download s", "compute s", "upload s", "MB down", "MB up", "kJ", "rounds a day")
    rows = []
    for forecast in plan.forecasts:
        job = forecast.job
        sizes = job.bytes_down / 1e6, job.bytes_up / 1e6
        values = [*job.phases, *sizes, forecast.joules / 1000, forecast.rounds_per_day]
        cells = [three_digits(value) if forecast.fit.fits else "-" for value in values]
        rows.append({"device": forecast.device.name, **dict(zip(names, cells, strict=True))})
    return _table("A visit", rows)


def _table(title: str, rows: list[dict[str, str]]) -> Table:
    return rich_table(title, rows[0], (row.values() for row in rows), left=("device", "fits", "train"))


def advice(plan: Plan) -> list[str]:
    """Return one line for each device that would not take part, with a remedy, and for facts beside the tables."""
    lines = []
    if names := plan.settings.get("ranks_of_no_device"):
        lines.append(
            f"federated.algorithm.ranks: {', '.join(names)}: no such device, so they are taken for clients, whose ranks the "
            "tables leave out; a run refuses a name that is neither"
        )
    later, jobs = plan.settings["later_bytes_down"], [forecast.job for forecast in plan.forecasts]
    if jobs and all(job.bytes_down > later for job in jobs):
        size = f"{three_digits(later / 1e6)} MB"
        lines.append(f"download s and MB down are of a client's first visit; in later ones it gets {size}")
    return [*lines, *filter(None, (_advice(plan, forecast) for forecast in plan.forecasts))]


def _advice(plan: Plan, forecast: Forecast) -> str:
    name, seconds = forecast.device.name, three_digits(forecast.job.seconds)
    if forecast.reason == "late":
        return f"{name}: a visit takes {seconds} s, the round {three_digits(plan.settings['deadline_seconds'])} s"
    if forecast.reason == "left":
        return f"{name}: a visit takes {seconds} s, it is never available for so long"
    if forecast.reason == "never":
        return f"{name}: it is never available (availability: 0)"
    if forecast.reason != "out_of_memory":
        return ""
    needs = three_digits(forecast.fit.footprint.peak_bytes / GIB)
    has = three_digits(forecast.device.budget_bytes / GIB)
    ways = []
    if forecast.forward_fits:
        options = "--federated.forward ZerothOrder --federated.forward.only_where_needed true"
        ways.append(f"forward passes alone ({options})")
    for remedy in plan.remedies[name]:
        changes = []
        if remedy.weight_bits < forecast.device.weight_bits:
            changes.append(f"a base of {remedy.weight_bits} bits (weight_bits: {remedy.weight_bits})")
        if remedy.tokens < plan.settings["max_tokens"]:
            changes.append(f"texts of {remedy.tokens} tokens (--data.max_tokens {remedy.tokens})")
        ways.append(" and ".join(changes))
    if ways:
        return f"{name}: needs {needs} GiB and has {has}; it could join with {', or with '.join(ways)}"
    least = three_digits(plan.least_base_bytes / GIB)
    share = forecast.fit.footprint.peak_bytes / (forecast.device.memory_gib * GIB)
    # Rounded up, so that it suffices; more than all of the RAM is no remedy.
    more = f", or more of the RAM (memory_share: {math.ceil(share * 100) / 100})" if share <= 1 else ""
    return (
        f"{name}: needs {needs} GiB and has {has}; nothing helps but a smaller model, since at 4 bits the base takes "
        f"{least}{more}"
    )


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the whole plan in bytes and seconds, with the log's field names; costs of a device out of memory are null."""
    return {"settings": plan.settings, "devices": [_device(plan, forecast) for forecast in plan.forecasts]}


def _device(plan: Plan, forecast: Forecast) -> dict[str, Any]:
    device, fit, job = forecast.device, forecast.fit, forecast.job
    seconds = zip(("download_seconds", "compute_seconds", "upload_seconds"), job.phases, strict=True)
    sizes = {"bytes_down": job.bytes_down, "bytes_up": job.bytes_up}
    spent = {**sizes, **dict(seconds), "flops": job.flops, "joules": forecast.joules}
    return {
        "device": device.name,
        "share": plan.shares.get(device.name),
        "reason": forecast.reason,
        "weight_bits": device.weight_bits,
        "lora_rank": forecast.lora_rank,
        "micro_batch": fit.micro_batch,
        "checkpointing": fit.checkpointing,
        "train": "forward" if fit.forward else "backprop",
        "forward_fits": forecast.forward_fits or (fit.forward and fit.fits),
        **asdict(fit.footprint),
        "peak_bytes": fit.footprint.peak_bytes,
        "budget_bytes": device.budget_bytes,
        **(spent if fit.fits else dict.fromkeys(spent)),
        "rounds_per_day": forecast.rounds_per_day,
        "remedies": [asdict(remedy) for remedy in plan.remedies.get(device.name, [])],
    }
