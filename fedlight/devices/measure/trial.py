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
from torch import Tensor, nn
from torch.nn import functional

from fedlight.devices.cost import without_weights
from fedlight.devices.hardware import choose_device, has_cuda
from fedlight.devices.measure.machine import POWERCAP, Rapl, load, memory, processor
from fedlight.devices.shape_run import ShapeRun

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


class LoraLinear(nn.Module):
    """Frozen linear layer with a trained fp32 adapter beside it, as in PEFT."""

    def __init__(self, inputs: int, outputs: int, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=False, dtype=dtype).requires_grad_(False)
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, ``(..., outputs)``, in the number type of ``x``, ``(..., inputs)``."""
        adapted: Tensor = self.up(self.down(x.float()))
        base: Tensor = self.base(x)
        return base + adapted.to(x.dtype)


class Layer(nn.Module):
    """Causal attention and a feed-forward part four times as wide."""

    def __init__(self, width: int, heads: int, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width, dtype=dtype) for _ in range(2)).requires_grad_(False)
        sizes = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
        self.attend, self.out, self.widen, self.narrow = (LoraLinear(*size, rank, dtype) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``(examples, tokens, width)``, as ``x`` is."""
        parts = self.attend(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind()  # [examples, heads, tokens, features]
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        hidden: Tensor = x + self.narrow(functional.gelu(self.widen(self.norms[1](x))))
        return hidden


class SmallTransformer(nn.Module):
    """Language model of random weights with trained LoRA on all layers.

    Args:
        width, layers, heads, words: shape of the model; ``heads`` divides ``width``.
        rank: rank of LoRA.
        dtype: number type of the frozen base.
    """

    def __init__(
        self, width: int, layers: int, heads: int, words: int, rank: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width, dtype=dtype).requires_grad_(False)
        self.layers = nn.Sequential(*(Layer(width, heads, rank, dtype) for _ in range(layers)))
        self.head = nn.Linear(width, words, bias=False, dtype=dtype).requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the mean loss of predicting each token of ``ids``, ``(examples, tokens + 1)``, from those before."""
        logits = self.head(self.layers(self.embedding(ids[:, :-1])))
        return functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())

    def step_flops(self, ids: Tensor) -> int:
        """Return the operations of a training step, counted as those of a visit are."""
        ghost, ids = without_weights(self), ids.cpu()
        with ShapeRun([*ghost.parameters(), ids]) as counted:
            ghost(ids).backward()
        return counted.flops
