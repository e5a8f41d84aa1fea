"""Output of a plan: two tables, advice for each device that would not take part, and the same as JSON."""

import math
from dataclasses import asdict
from typing import Any

from rich.table import Table

from fedlight.devices.forecast import Forecast, Plan
from fedlight.support.console import rich_table, wide_console
from fedlight.support.words import three_digits

GIB = 2**30
FITS = {"out_of_memory": "out of memory", "late": "yes, but late", "left": "yes, but leaves"}
SIZES = ("base", "adapter", "gradients", "moments", "activations", "peak", "budget")
BATCH = "batches of {batch_size} texts of {max_tokens} tokens"


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
