"""``fedlight device measure --name NAME [--seconds S] [--watts W] [--force] ...``."""

import argparse
import re
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from fedlight.support.console import OneLineArguments

if TYPE_CHECKING:  # --help and wrong options need no torch
    from fedlight.devices.measure.trial import Trial

ABOUT = """Measure this machine and write its profile as a device, for a fleet or a plan:

  fedlight device measure --name my_laptop
  fedlight plan --config selector.yaml --federated.fleet '{class_path: Fleet, init_args: {devices: {my_laptop: 1}}}'

Let nothing else run meanwhile. The profile is written to devices/ in the current folder, where its name is looked up."""
GIB = 2**30
BUSY = 0.25
"""Least load of other work, in cores, at which a trial says that the machine was not idle."""
DOWNLOAD_MBPS, UPLOAD_MBPS = 94.0, 50.0
"""Worldwide medians of fixed lines, as in fedlight's own profiles."""


def main(argv: Sequence[str]) -> None:
    """Run ``fedlight device``."""
    options = make_parser().parse_args(argv)
    from fedlight.devices.measure.trial import measure
    from fedlight.support.files import refuse_unwritable, write_whole

    file = profile_file(options.name, options.folder, options.force)
    for key in ("watts", "download_mbps", "upload_mbps"):
        value = getattr(options, key)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"--{key.replace('_', '-')} {value}: give a number above 0")
    refuse_unwritable(options.folder, "--folder")
    print(f"measuring this machine for {options.seconds:g} s or a little longer", flush=True)
    trial = measure(options.seconds, options.device)
    text = profile_text(options.name, trial, options.watts, options.download_mbps, options.upload_mbps)
    write_whole(file, text)
    print(f"{text}{file} is written")
    if is_busy(trial):
        print(f"other work kept {trial.load:.1f} cores busy: measure again on an idle machine, with --force")
    if trial.watts is None and options.watts is None:
        print(
            f"watts is null, as {trial.no_watts}: a run refuses the profile until a number is written in; --watts "
            "gives the power drawn in training"
        )


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of ``fedlight device``."""
    parser = OneLineArguments("fedlight device", description="Devices that are emulated.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", metavar="measure", required=True)
    trial = commands.add_parser(
        "measure",
        help="write a profile of this machine, in two minutes",
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    trial.add_argument("--name", required=True, help="name of the device, and of its file")
    trial.add_argument("--seconds", type=float, default=120.0, metavar="S", help="time for the trial: 120")
    trial.add_argument(
        "--device",
        default="auto",
        metavar="auto|cpu|cuda",
        help="what to measure: the GPU where there is one",
    )
    trial.add_argument(
        "--watts", type=float, metavar="W", help="power drawn in training, where it cannot be measured"
    )
    trial.add_argument(
        "--download-mbps", type=float, metavar="M", help="megabits a second from the server; not measured"
    )
    trial.add_argument(
        "--upload-mbps", type=float, metavar="M", help="megabits a second to the server; not measured"
    )
    trial.add_argument(
        "--folder", type=Path, default=Path("devices"), help="where the profile is written: devices"
    )
    trial.add_argument("--force", action="store_true", help="replace a profile of this name")
    return parser


def figures(trial: "Trial") -> dict[str, float]:
    """Return the keys of a profile that follow from a trial.

    ``tflops`` is the fastest product of matrices, or the fastest training step where that is faster, and ``utilisation`` the
    share of it that the latter reaches: their product is the speed of visits. ``memory_share`` is the free part, 0.5 where
    it is not known.

    Examples:
        >>> from fedlight.devices.measure.trial import Trial
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
    trial: "Trial",
    watts: float | None = None,
    download_mbps: float | None = None,
    upload_mbps: float | None = None,
) -> str:
    """Return the YAML of a profile, from a trial and numbers in the place of what is measured or estimated.

    Raises:
        ValueError: a number is out of range.
    """
    import torch

    from fedlight.devices.device import Device

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


def is_busy(trial: "Trial") -> bool:
    """Return whether other work has kept a quarter of a core or more busy."""
    return trial.load is not None and trial.load >= BUSY


def profile_file(name: str, folder: Path, force: bool) -> Path:
    """Return the file of a profile, which ``load_device`` finds by its name where the folder is ``devices``.

    Raises:
        FileExistsError: there is such a file, and ``force`` is False.
        ValueError: the name is that of one of fedlight's devices, or no name of a file.
    """
    from fedlight.devices.device import known_devices

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


def _power(trial: "Trial", watts: float | None) -> str:
    if watts is not None:
        return "as given"
    if trial.watts is None:
        return f"null, as {trial.no_watts}; write in the watts that it draws in training"
    return "that of the processor in these steps, measured by its energy counters (RAPL)"


def _short(value: float) -> float:
    return float(f"{value:.3g}")
