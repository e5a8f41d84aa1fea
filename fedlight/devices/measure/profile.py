"""Profile of a device, written from a trial of this machine, with the source of each figure in a comment."""

import re
from datetime import date
from pathlib import Path

import torch

from fedlight.devices.device import Device, known_devices
from fedlight.devices.measure.trial import Trial

GIB = 2**30
BUSY = 0.25
"""Least load of other work, in cores, at which a trial says that the machine was not idle."""
DOWNLOAD_MBPS, UPLOAD_MBPS = 94.0, 50.0
"""Worldwide medians of fixed lines, as in fedlight's own profiles."""


def figures(trial: Trial) -> dict[str, float]:
    """Return the keys of a profile that follow from a trial.

    ``tflops`` is the fastest product of matrices, or the fastest training step where that is faster, and ``utilisation`` the
    share of it that the latter reaches: their product is the speed of visits. ``memory_share`` is the free part, 0.5 where
    it is not known.

    Examples:
        >>> products, steps = {"fp32": 2e11, "bf16": 1e11}, {"fp32": 5e10, "bf16": 2e10}
        >>> figures(Trial("x", 1, 8 * GIB, 6 * GIB, 1024, products, steps, 1e9, None, ""))
        {'memory_gib': 8.0, 'memory_share': 0.75, 'tflops': 0.2, 'utilisation': 0.25}
    """
    # A step of products that fit the caches better can be faster than the timed product.
    step = max(trial.step_flops.values())
    peak = max(step, *trial.product_flops.values())
    free = 0.5 if trial.free_bytes is None else trial.free_bytes / trial.memory_bytes
    return {
        "memory_gib": _short(trial.memory_bytes / GIB),
        "memory_share": _short(free),
        "tflops": _short(peak / 1e12),
        "utilisation": _short(step / peak),
    }


def profile_text(
    name: str,
    trial: Trial,
    watts: float | None = None,
    download_mbps: float | None = None,
    upload_mbps: float | None = None,
) -> str:
    """Return the YAML of a profile, from a trial and numbers in the place of what is measured or estimated.

    Raises:
        ValueError: a number is out of range.
    """
    keys: dict[str, float | None] = {**figures(trial)}
    keys["download_mbps"] = DOWNLOAD_MBPS if download_mbps is None else download_mbps
    keys["upload_mbps"] = UPLOAD_MBPS if upload_mbps is None else upload_mbps
    keys["watts"] = watts if watts is not None else None if trial.watts is None else _short(trial.watts)
    # Refuses numbers that no device can have.
    Device(name, **{key: 1.0 if value is None else value for key, value in keys.items()})  # type: ignore[arg-type]
    free = (
        "half of it for training is an estimate"
        if trial.free_bytes is None
        else "memory_share is what was free"
    )
    products, steps = (
        ", ".join(f"{_short(rate / 1e12):g} in {kind}" for kind, rate in rates.items())
        for rates in (trial.product_flops, trial.step_flops)
    )
    network = (
        "as given"
        if None not in (download_mbps, upload_mbps)
        else "not measured; an estimate, worldwide medians of fixed lines"
    )
    lines = [
        f"{name}, measured by fedlight device measure on {date.today().isoformat()} with torch {torch.__version__}.",
        "",
        f"Memory:  {trial.memory_bytes / GIB:.1f} GiB of {trial.processor}; {free}.",
        f"Speed:   TFLOPS with threads={trial.threads}, products of matrices {trial.matrix} wide: {products}.",
        f"         Training steps of a small transformer with LoRA: {steps}.",
        "         The fastest of all is tflops, the fastest step utilisation times tflops.",
        *(
            [f"         Other work kept {trial.load:.1f} cores busy: measured without it, this is faster."]
            if is_busy(trial)
            else []
        ),
        f"         Memory is read and written at {_short(trial.copy_bytes / 1e9):g} GB a second.",
        f"Power:   {_power(trial, watts)}.",
        f"Network: {network}.",
        "Base:    16 bits; 8 (int8) or 4 (NF4) for a model that does not fit.",
    ]
    comment = "".join(f"# {line}".rstrip() + "\n" for line in lines)
    values = "".join(f"{key}: {'null' if value is None else f'{value:g}'}\n" for key, value in keys.items())
    return f"{comment}{values}weight_bits: 16\n"


def is_busy(trial: Trial) -> bool:
    """Return whether other work has kept a quarter of a core or more busy."""
    return trial.load is not None and trial.load >= BUSY


def profile_file(name: str, folder: Path, force: bool) -> Path:
    """Return the file of a profile, which ``load_device`` finds by its name where the folder is ``devices``.

    Raises:
        FileExistsError: there is such a file, and ``force`` is False.
        ValueError: the name is that of one of fedlight's devices, or no name of a file.
    """
    if not re.fullmatch(r"\w[\w.-]*", name) or name.endswith((".yaml", ".yml")):
        raise ValueError(
            f"--name {name}: give letters, digits, '_', '-' and '.', such as my_laptop, without an ending"
        )
    if name in known_devices():
        raise ValueError(f"--name {name}: fedlight has a device of this name; give another")
    file = folder / f"{name}.yaml"
    if file.exists() and not force:
        raise FileExistsError(f"{file} exists: --force replaces it, or give another --name")
    return file


def _power(trial: Trial, watts: float | None) -> str:
    if watts is not None:
        return "as given"
    if trial.watts is None:
        return f"null, as {trial.no_watts}; write in the watts that it draws in training"
    return "that of the processor in these steps, measured by its energy counters (RAPL)"


def _short(value: float) -> float:
    return float(f"{value:.3g}")
