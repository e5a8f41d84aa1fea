"""Forecasts of the emulator against times, memory and bytes that EdgeFlowerTune measured on phones and boards.

The measurements are those of Gemma 3 270M with LoRA in fp32 on Hi nova 9 Pro phones and Jetson Nano boards, published in the
project's repository (https://github.com/Edge-Intelligence-Lab/EdgeFlowerTune, commit c5f9bdd, folder docs/original):
``current_system_and_device_profile_20260421.md``, sections 5.2, 6.1 and 6.2, and ``report.md``, sections 4.1 to 4.5. The
tables of the papers (https://arxiv.org/abs/2605.08636, https://arxiv.org/abs/2512.08211) and of "Federated Fine-Tuning of
LLMs on the Very Edge" (https://arxiv.org/abs/2310.03150) were not available, and no published energy was. Nothing is
trained: models are shapes, and a visit is forecast as by ``fedlight plan``.

* time: seconds of a step. The emulator knows the operations of a step but not the share of the peak that a device's software
  reaches, so this utilisation is fitted on every second case, in the order of their names, and tested on the others. It is
  the geometric mean of the shares that the fitted cases reached. Two ways: one utilisation for each device, like a
  profile's; and one for each device and release of the software on it. Releases differ in the shape of a batch as well, so
  either of the two may have changed the utilisation. Within a release all phones do the same step, as do all boards: its
  errors are the spread of clients and runs, and no test of how time follows from another shape.
* memory: forecast peak with a base in fp32, against the published average of the process's resident memory. They are not the
  same: an average is below a peak, and memory of a GPU is not resident memory. One peak is published, without sharding, for
  "commodity mobile devices" (README.md of MobileFineTuner, as copied at https://github.com/jmha02/MobileFineTuner, commit
  483edea); the batch is that of the table of speeds below it, 4 texts of 256 tokens, which is an assumption.
* bytes: of the adapter that a client sends, in fp32.

Run: python benchmarks/edge_devices.py [--json FILE]
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fedlight.conf import path as conf_path
from fedlight.devices.cost import CostMeter
from fedlight.devices.device import Device, load_device
from fedlight.devices.forecast import Workload, forecast
from fedlight.devices.shape import BatchShape
from fedlight.modules.language.adapters import Lora, trained_parameters
from fedlight.modules.sft import SFTModule

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ADAM_BYTES = 8.0
"""Bytes of AdamW's moments for each trained weight."""
GOAL = 0.2
"""Largest relative error that counts as close."""


@dataclass(frozen=True)
class Case:
    """One published measurement.

    Attributes:
        name: device/experiment/client.
        release: software on the device: dates of the runs, between which it changed.
        batch: examples computed at a time.
        parts: batches whose gradients are added up for a step.
        tokens: of a text.
        steps: of a visit.
        step_seconds: published seconds of a step: those of a visit over its steps, where only these are published.
        resident_mb: published average of the process's resident memory in MB; None where none is published.
        bytes_up: published bytes that a client sends in a round; None where none are.
        ranks: ranks of LoRA of the clients over which the figures are averaged.
    """

    name: str
    release: str
    batch: int
    parts: int
    tokens: int
    steps: int
    step_seconds: float
    resident_mb: float | None = None
    bytes_up: int | None = None
    ranks: tuple[int, ...] = (8,)

    @property
    def device(self) -> str:
        """Name of the profile."""
        return self.name.partition("/")[0]


PHONE, BOARD = "hi_nova_9_pro", "jetson_nano"
PHONE_BYTES, BOARD_BYTES = 2_960_640, 2_949_000  # of the boards, megabytes with three digits are published


def _eight_clients(experiment: str, rows: dict[str, tuple[float, float]]) -> list[Case]:
    """Return cases of section 6: ten steps on 8 texts of 64 tokens, which a board computes one after the other."""
    found = []
    for client, (resident, seconds) in rows.items():
        board = client.startswith("jetson")
        batch, parts = (1, 8) if board else (8, 1)
        name = f"{BOARD if board else PHONE}/{experiment}/{client}"
        sent = BOARD_BYTES if board else PHONE_BYTES
        found.append(Case(name, "2026-04-16", batch, parts, 64, 10, seconds, resident, sent))
    return found


def _three_phones(experiment: str, seconds: float, steps: int, **figures: Any) -> Case:
    """Return a case of report.md: a text of 128 tokens a step, averages of three phones."""
    return Case(f"{PHONE}/{experiment}/mean", "2026-04-08", 1, 1, 128, steps, seconds / steps, **figures)


CASES = (
    # Section 6.1; client: average resident MB, average seconds of a step.
    *_eight_clients(
        "fedavg_wikitext",
        {
            "jetson_121": (731.2, 11.3659),
            "jetson_151": (606.6, 14.1289),
            "jetson_88": (589.4, 11.8274),
            "nova_19": (1070.6, 170.1887),
            "nova_252": (1070.6, 174.3541),
            "nova_49": (1065.6, 170.3717),
            "nova_72": (1069.2, 170.5589),
            "nova_78": (1071.3, 170.6399),
        },
    ),
    # Section 6.2
    *_eight_clients(
        "fedavg_mmlu",
        {
            "jetson_121": (601.3, 10.8456),
            "jetson_151": (622.5, 12.3349),
            "jetson_88": (805.4, 10.3642),
            "nova_19": (1072.4, 167.5717),
            "nova_252": (1071.8, 171.0454),
            "nova_49": (1069.3, 168.0978),
            "nova_72": (1070.8, 167.7521),
            "nova_78": (1072.3, 167.3728),
        },
    ),
    # report.md, sections 4.1.3, 4.2.3, 4.3.3 and 4.5.3: seconds of a visit
    _three_phones("fedavg_128", 229.5, 1, bytes_up=2_960_640),
    _three_phones("fedprox_128", 457.3, 2, bytes_up=2_960_640),
    # one client each; the published bytes are 1,486,080, 2,960,640 and 5,909,760
    _three_phones(
        "flexlora_128", 269.1, 1, bytes_up=(1_486_080 + 2_960_640 + 5_909_760) // 3, ranks=(4, 8, 16)
    ),
    _three_phones("local_128", 226.5, 1, bytes_up=2_960_640),
)
PEAK_CASE, PEAK_MB = Case(f"{PHONE}/peak_256/unknown", "2025", 4, 1, 256, 1, step_seconds=math.nan), 4200.0
"""Case of the one published peak of memory, and the peak; no seconds of a step are published for it."""


@dataclass(frozen=True)
class Row:
    """Case with its forecast.

    Attributes:
        case: the measurement.
        fitted: whether utilisation is fitted on it.
        flops: of a step, forecast.
        peak_mb: forecast peak of memory, with a base in fp32.
        bytes_up: forecast bytes of the adapter.
        by_device: forecast seconds of a step with one utilisation for each device.
        by_release: the same with one for each device and release of its software.
    """

    case: Case
    fitted: bool
    flops: float
    peak_mb: float
    bytes_up: int
    by_device: float
    by_release: float


@cache
def _sketch(model: str, rank: int) -> tuple[CostMeter, frozenset[str], int]:
    """Return the meter, the names of the trained parameters, and the bytes of these."""
    module = SFTModule(model, lora=Lora(rank=rank, targets=ATTENTION, dropout=0.0)).skeleton("fp32")
    trained = trained_parameters(module)
    return CostMeter(module), frozenset(trained), sum(weight.nbytes for weight in trained.values())


def expect(case: Case, model: str) -> tuple[float, float, int]:
    """Return FLOPs of a step, the peak of memory in MB, and bytes sent, averaged over the ranks of a case."""
    device = replace(
        load_device(case.device), memory_gib=1024.0, weight_bits=16
    )  # as published: nothing is made smaller
    found = []
    for rank in case.ranks:
        meter, trained, sent = _sketch(model, rank)
        shape = BatchShape(case.batch, case.tokens, case.batch * (case.tokens - 1))
        work = Workload(meter, trained, ADAM_BYTES, shape, case.parts * case.steps, sent, sent)
        one = forecast(device, work)
        footprint = one.fit.footprint
        # A base at 16 bits counts 2 bytes a weight; theirs has 4.
        peak = footprint.peak_bytes + footprint.base_bytes
        found.append((one.job.flops / case.steps, peak / 1e6, sent))
    flops, peaks, bytes_up = (statistics.fmean(values) for values in zip(*found, strict=True))
    return flops, peaks, round(bytes_up)


def halves(names: Iterable[str]) -> dict[str, bool]:
    """Return name -> whether it is fitted: the first, third, fifth and so on, sorted by name."""
    return {name: number % 2 == 0 for number, name in enumerate(sorted(names))}


def fit_utilisation(cases: Sequence[tuple[Device, float, float]]) -> float:
    """Return the geometric mean of the shares of the peak that were reached; a case is (device, FLOPs, seconds)."""
    return math.exp(
        statistics.fmean(
            math.log(flops / seconds / (device.tflops * 1e12)) for device, flops, seconds in cases
        )
    )


def compare(cases: Sequence[Case], model: str) -> tuple[list[Row], dict[str, float]]:
    """Return the rows, sorted by name, and device, or device and release -> fitted utilisation.

    Raises:
        ValueError: a device or release has no case for the fit.
    """
    fitted = halves(case.name for case in cases)
    cases = sorted(cases, key=lambda case: case.name)
    expected = {case.name: expect(case, model) for case in cases}
    groups: tuple[Callable[[Case], str], ...] = (
        lambda case: case.device,
        lambda case: f"{case.device}, {case.release}",
    )
    found: dict[str, float] = {}
    for group in groups:
        for name in {group(case): None for case in cases}:
            own = [case for case in cases if group(case) == name and fitted[case.name]]
            if not own:
                raise ValueError(
                    f"{name}: there is no case on which to fit its utilisation; add measurements of it"
                )
            found[name] = fit_utilisation(
                [(load_device(case.device), expected[case.name][0], case.step_seconds) for case in own]
            )
    rows = []
    for case in cases:
        flops, peak, sent = expected[case.name]
        seconds = [
            replace(load_device(case.device), utilisation=found[group(case)]).compute_seconds(flops)
            for group in groups
        ]
        rows.append(Row(case, fitted[case.name], flops, peak, sent, *seconds))
    return rows, found


def error(predicted: float, published: float | None) -> float | None:
    """Return the relative error, above 0 where the prediction is too high; None without a published figure."""
    return None if published is None else predicted / published - 1


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Return median and largest errors of the tested half, by the compared quantity."""
    tested = [row for row in rows if not row.fitted]
    parts: dict[str, list[float | None]] = {
        "seconds, one utilisation for each device": [
            error(row.by_device, row.case.step_seconds) for row in tested
        ],
        "seconds, one for each device and release": [
            error(row.by_release, row.case.step_seconds) for row in tested
        ],
        "memory, peak against an average": [error(row.peak_mb, row.case.resident_mb) for row in rows],
        "bytes sent": [error(row.bytes_up, row.case.bytes_up) for row in rows],
    }
    found = {}
    for name, errors in parts.items():
        sizes = [abs(one) for one in errors if one is not None]
        if sizes:
            close = sum(size <= GOAL for size in sizes)
            found[name] = {
                "cases": len(sizes),
                "within_goal": close,
                "median": statistics.median(sizes),
                "largest": max(sizes),
            }
    return found


def show(rows: Sequence[Row], found: dict[str, float], model: str) -> None:
    """Print the tables."""
    console = Console()
    console = console if console.is_terminal else Console(width=200)
    table = Table(title="A step of Gemma 3 270M with LoRA: published, forecast, error")
    for name in (
        "case",
        "half",
        "s",
        "by device",
        "",
        "by release",
        "",
        "resident MB",
        "peak MB",
        "",
        "bytes up",
        "forecast",
        "",
    ):
        table.add_column(name, justify="left" if name in ("case", "half") else "right")
    for row in rows:
        case = row.case
        table.add_row(
            *(case.name, "fitted" if row.fitted else "tested", f"{case.step_seconds:.1f}"),
            *(f"{row.by_device:.1f}", _percent(error(row.by_device, case.step_seconds))),
            *(f"{row.by_release:.1f}", _percent(error(row.by_release, case.step_seconds))),
            *("-" if case.resident_mb is None else f"{case.resident_mb:.0f}", f"{row.peak_mb:.0f}"),
            _percent(error(row.peak_mb, case.resident_mb)),
            *("-" if case.bytes_up is None else f"{case.bytes_up:,}", f"{row.bytes_up:,}"),
            _percent(error(row.bytes_up, case.bytes_up)),
        )
    console.print(table)
    for name, share in found.items():
        console.print(f"utilisation of {name}: {share:.4f}", highlight=False)
    for name, one in summary(rows).items():
        console.print(
            f"{name}: {one['within_goal']} of {one['cases']} within {GOAL:.0%}; error {one['median']:.1%} in the median, "
            f"{one['largest']:.1%} at most",
            highlight=False,
        )
    peak = _peak(model)
    console.print(
        f"{peak['what']}: {PEAK_MB:.0f} MB published, {peak['forecast_mb']:.0f} MB forecast, "
        + _percent(error(peak["forecast_mb"], PEAK_MB)),
        highlight=False,
    )
    console.print(
        "energy: no published figure was available. Within a device and release all cases have one shape: these errors are\n"
        "the spread of clients and runs; one utilisation for each device shows what becomes of another shape and release."
    )


def _peak(model: str) -> dict[str, Any]:
    """Return the comparison with the one published peak, in the form of `summary`."""
    forecast_mb = expect(PEAK_CASE, model)[1]
    found = abs(error(forecast_mb, PEAK_MB) or 0.0)
    sizes = {"cases": 1, "within_goal": int(found <= GOAL), "median": found, "largest": found}
    return {"what": "memory, peak against a peak", **sizes, "forecast_mb": forecast_mb}


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args(argv)
    model = str(conf_path("shapes/gemma_3_270m"))
    rows, found = compare(CASES, model)
    show(rows, found, model)
    if options.json:
        errors = [{"what": name, **one} for name, one in summary(rows).items()]
        content = {
            "rows": [*errors, _peak(model)],
            "utilisation": found,
            "cases": [asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
