"""Trial of this machine: products of matrices, steps of a small transformer, copies of memory, and power meanwhile."""

import functools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedlight.devices.hardware import choose_device, has_cuda
from fedlight.devices.measure.machine import POWERCAP, Rapl, load, memory, processor
from fedlight.devices.measure.model import SmallTransformer

KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16}
LEAST_CALLS = 3
"""Number of timed calls of each part, however long they take."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the timed work.

    Args:
        matrix: rows and columns of the matrices that are multiplied.
        width, layers, heads, words, rank: of `SmallTransformer`.
        examples, tokens: of a batch.
        copied_bytes: memory that is copied at a time, larger than the caches.
    """

    matrix: int = 1024
    width: int = 512
    layers: int = 4
    heads: int = 8
    words: int = 4096
    rank: int = 8
    examples: int = 4
    tokens: int = 128
    copied_bytes: int = 2**28


GPU_SIZES = Sizes(
    matrix=8192, width=2048, layers=8, heads=16, words=32_768, examples=16, tokens=512, copied_bytes=2**30
)


@dataclass(frozen=True)
class Trial:
    """Figures of this machine.

    Attributes:
        processor: name of the GPU or of the processor.
        threads: threads of torch.
        memory_bytes: all of its memory.
        free_bytes: the part that was free at the start; None where the system does not say.
        matrix: edge of the multiplied matrices.
        product_flops: ``fp32`` or ``bf16`` -> operations a second in products of matrices.
        step_flops: the same in training steps of a small transformer with LoRA, counted as those of a visit are.
        copy_bytes: bytes read and written a second.
        watts: power drawn in these steps; None where it cannot be read.
        no_watts: why it cannot be read, else "".
        load: cores that other work kept busy just before; None where the system does not say.
    """

    processor: str
    threads: int
    memory_bytes: int
    free_bytes: int | None
    matrix: int
    product_flops: dict[str, float]
    step_flops: dict[str, float]
    copy_bytes: float
    watts: float | None
    no_watts: str
    load: float | None = None


def measure(
    seconds: float, device: str = "auto", sizes: Sizes | None = None, counters: Path = POWERCAP
) -> Trial:
    """Return the figures of this machine.

    Args:
        seconds: time for all of it, above 0, shared equally by its parts. Each is timed three times at least, after a call
            to warm up.
        device: ``auto`` for the GPU where there is one, ``cpu`` or ``cuda``.
        sizes: sizes of the timed work; None for those that suit the device.
        counters: folder of the energy counters.

    Raises:
        ValueError: ``seconds`` is not above 0 or endless, or there is no such device.
    """
    if not 0 < seconds < math.inf:
        raise ValueError(f"--seconds {seconds:g}: give a number above 0; 120 are enough")
    if device not in ("auto", "cpu", "cuda") or (device == "cuda" and not has_cuda()):
        raise ValueError(f"--device {device}: torch finds no such device here to measure; take cpu or auto")
    place = choose_device(device)
    if sizes is None:
        sizes = GPU_SIZES if place.type == "cuda" else Sizes()
    busy = load(min(1.0, seconds / 100))  # before this process works
    size, free = memory(place)
    share = seconds / (2 * len(KINDS) + 1)  # products and steps of each number type, and the copies
    products = measure_products(sizes.matrix, place, share)
    copied = _copy_bytes(sizes.copied_bytes, place, share)
    rapl, no_watts = _counters(place, counters)
    before, start = rapl.read() if rapl else {}, time.perf_counter()
    steps = {name: step_flops(sizes, kind, place, share) for name, kind in KINDS.items()}
    watts = rapl.joules(before, rapl.read()) / (time.perf_counter() - start) if rapl else None
    if watts == 0:
        watts, no_watts = None, f"the counters of {counters} stand still"
    return Trial(
        processor(place),
        torch.get_num_threads(),
        size,
        free,
        sizes.matrix,
        products,
        steps,
        copied,
        watts,
        no_watts,
        busy,
    )


def _counters(device: torch.device, root: Path) -> tuple[Rapl | None, str]:
    """Return the energy counters, or None and the reason."""
    if device.type != "cpu":
        return None, f"the energy of {device.type} is not read"
    try:
        return Rapl(root), ""
    except PermissionError as error:
        return None, f"{error.filename} may be read by root alone"
    except OSError as error:
        return None, str(error)


def measure_products(edge: int, device: torch.device, seconds: float) -> dict[str, float]:
    """Return ``fp32`` or ``bf16`` -> operations a second in products of matrices ``edge`` wide; each takes ``seconds``."""
    speeds = {}
    for name, kind in KINDS.items():
        left, right = (torch.randn(edge, edge, device=device).to(kind) for _ in range(2))
        call = functools.partial(torch.matmul, left, right)
        # Each of edge^3 terms is a product and a sum.
        speeds[name] = 2 * edge**3 / median_seconds(call, seconds, device)
    return speeds


def _copy_bytes(size: int, device: torch.device, seconds: float) -> float:
    source = torch.ones(size // 4, device=device)  # fp32
    target = torch.empty_like(source)
    # Every byte is read and written.
    return 2 * source.nbytes / median_seconds(lambda: target.copy_(source), seconds, device)


def step_flops(sizes: Sizes, kind: torch.dtype, device: torch.device, seconds: float) -> float:
    """Return the operations a second in training steps of a `SmallTransformer`, timed for so many seconds."""
    model = SmallTransformer(sizes.width, sizes.layers, sizes.heads, sizes.words, sizes.rank, kind).to(device)
    ids = torch.randint(sizes.words, (sizes.examples, sizes.tokens + 1), device=device)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        model(ids).backward()
        optimizer.step()

    return model.step_flops(ids) / median_seconds(step, seconds, device)


def median_seconds(call: Callable[[], Any], seconds: float, device: torch.device) -> float:
    """Return the median time of a call, in so many seconds, but of three calls at least; the first is not counted."""

    def timed() -> float:
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # a call returns before the GPU has done its work
        return time.perf_counter() - start

    end = time.perf_counter() + seconds
    timed()  # the first call also allocates memory and loads kernels
    times: list[float] = []
    while len(times) < LEAST_CALLS or time.perf_counter() < end:
        times.append(timed())
    return statistics.median(times)
