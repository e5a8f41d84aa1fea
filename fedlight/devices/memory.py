"""Memory of a visit on a device, part by part, and how the visit is made to fit.

The peak of a training step is the sum of the frozen base, rounded to ``weight_bits``; the trained adapter; its gradients and
the optimizer's moments; and the activations of one batch, as `CostMeter` counts them. A batch that is too large is split
into smaller parts whose gradients are added up; if that is not enough, activations are recomputed instead of kept. Either
way the gradients are the same up to rounding. A forward-only visit (`fedlight.federation.forward.zeroth_order`) has a copy
of its adapter in the place of gradients and moments, and keeps activations no longer than inference does. Memory that
kernels take while they run is left out, such as one layer's weights in 16 bits where they are not multiplied in their
rounded form.
"""

import copy
import inspect
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Literal

import torch
from torch import nn
from torch.optim import Optimizer

from fedlight.devices.cost import CostMeter, StepCost
from fedlight.devices.quantization import is_transposed, quantizable_layers
from fedlight.devices.shape import BatchShape
from fedlight.federation.protocols import HoldsAdapters

Train = Literal["backprop", "forward", "auto"]
"""Training of clients: by backpropagation, by forward passes alone, or by the first of both that fits the device."""

NF4_BLOCK = 64
"""Number of weights that share a scale in an NF4 base."""


@dataclass(frozen=True)
class Footprint:
    """Bytes of a visit at its peak, by part.

    Args:
        base_bytes: all weights that the visit does not train; frozen ones in the device's precision.
        adapter_bytes: trained weights; of a forward-only visit twice, with the unperturbed copy.
        gradient_bytes: gradients of the trained weights, and of others that require one.
        moment_bytes: state of the optimizer.
        activation_bytes: activations of one step; 0 where nothing runs.

    Examples:
        >>> Footprint(10, 4, 4, 8, 100).peak_bytes
        126
    """

    base_bytes: int
    adapter_bytes: int
    gradient_bytes: int
    moment_bytes: int
    activation_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """Sum of all parts."""
        return sum(astuple(self))


@dataclass(frozen=True)
class Fit:
    """Way to make a visit fit a device.

    Args:
        micro_batch: most examples that are computed at a time; those of the largest batch where it fits as a whole.
        checkpointing: whether activations are recomputed instead of kept.
        footprint: memory at the peak of the visit; the smallest there is if none fits.
        fits: whether that is within the budget.
        forward: whether it is trained by forward passes alone.
    """

    micro_batch: int
    checkpointing: bool
    footprint: Footprint
    fits: bool
    forward: bool = False


def resting_footprint(
    module: nn.Module,
    weight_bits: int,
    moment_bytes_per_weight: float,
    trained: Collection[str] | None = None,
    number_bytes: int = 2,
) -> Footprint:
    """Return the memory of a visit before its first step, without activations.

    Frozen ``nn.Linear`` layers that bitsandbytes quantizes take 1 byte a weight and a 4-byte scale a row at 8 bits, 1/2 and
    a 4-byte scale for each 64 weights at 4. Other frozen weights, at 16 bits all of them, take ``number_bytes`` each, and
    trained ones are fp32. A weight that two layers share counts once.

    Args:
        module: skeleton or loaded; its weights are not read.
        weight_bits: 16, 8 or 4.
        moment_bytes_per_weight: see `moment_bytes_per_weight`.
        trained: names of the parameters that the visit trains; None for all that require a gradient. Others that require
            one, such as the A of FFA-LoRA, rest there in fp32 beside their gradients; adapters of other groups are not on
            the device.
        number_bytes: bytes of a weight that is not quantized: 2, as on a device, or 4 for a base in fp32.

    Raises:
        ValueError: ``weight_bits`` is not 16, 8 or 4.

    Examples:
        >>> frozen, trained = nn.Linear(64, 8, bias=False).requires_grad_(False), nn.Linear(8, 2, bias=False)
        >>> resting_footprint(nn.Sequential(frozen, trained), weight_bits=4, moment_bytes_per_weight=8)
        Footprint(base_bytes=288, adapter_bytes=64, gradient_bytes=64, moment_bytes=128, activation_bytes=0)
    """
    if weight_bits not in (16, 8, 4):
        raise ValueError(f"weight_bits={weight_bits} must be 16, 8 or 4")
    quantized = {id(layer.weight): layer for layer in quantizable_layers(module).values()}
    elsewhere = _other_adapters(module, trained)
    base = learning = idle = 0
    for name, weight in module.named_parameters():  # each shared one once
        if weight.requires_grad and (trained is None or name in trained):
            learning += weight.numel()
        elif weight.requires_grad:
            idle += 0 if elsewhere & {*name.split(".")} else weight.numel()
        elif weight_bits < 16 and id(weight) in quantized:
            rows = weight.shape[1 if is_transposed(quantized[id(weight)]) else 0]
            scales = rows if weight_bits == 8 else math.ceil(weight.numel() / NF4_BLOCK)
            base += math.ceil(weight.numel() * weight_bits / 8) + 4 * scales
        else:
            base += number_bytes * weight.numel()
    moments = math.ceil(moment_bytes_per_weight * learning)
    return Footprint(base + 4 * idle, 4 * learning, 4 * (learning + idle), moments)  # trained in fp32


def _other_adapters(module: nn.Module, trained: Collection[str] | None) -> set[str]:
    if trained is None or not isinstance(module, HoldsAdapters):
        return set()
    return {*module.adapter_names} - {part for name in trained for part in name.split(".")}


def moment_bytes_per_weight(optimizer: Optimizer) -> float:
    """Return the bytes of state that an optimizer keeps for each weight, found by a step of it on other parameters.

    Where its parameter groups differ, as with momentum for some, this is the largest number. The optimizer, its state and
    its weights stay as they are.

    Raises:
        ValueError: its step needs a closure, as that of ``LBFGS`` does.

    Examples:
        >>> weight = nn.Parameter(torch.zeros(1))
        >>> moment_bytes_per_weight(torch.optim.AdamW([weight])), moment_bytes_per_weight(torch.optim.SGD([weight]))
        (8.0, 0.0)
    """
    step = type(optimizer).step  # the instance's own may be a scheduler's, which counts steps
    try:
        inspect.signature(step).bind(optimizer)
    except TypeError:
        raise ValueError(
            f"optimizer {type(optimizer).__name__}: its step needs a closure, so the moments that it keeps cannot be known "
            "beforehand; take another, such as AdamW or SGD, or run without devices"
        ) from None
    samples = [nn.Parameter(torch.zeros(64, 64)) for _ in optimizer.param_groups]
    for sample in samples:
        sample.grad = torch.zeros_like(sample)
    probe = copy.copy(optimizer)
    probe.param_groups = [
        {**group, "params": [sample]} for group, sample in zip(optimizer.param_groups, samples, strict=True)
    ]
    probe.state = defaultdict(dict)
    probe._optimizer_step_pre_hooks = OrderedDict()  # the project's hooks are not called
    probe._optimizer_step_post_hooks = OrderedDict()
    step(probe)
    sizes = []
    for sample in samples:
        tensors = [value for value in probe.state[sample].values() if isinstance(value, torch.Tensor)]
        # A single number, such as a count of steps, does not grow with the weights.
        sizes.append(sum(value.nbytes for value in tensors if value.numel() > 1) / sample.numel())
    return max(sizes)


def parts(shape: BatchShape, micro_batch: int) -> dict[BatchShape, int]:
    """Return the shapes of a batch's parts, computed one after the other, with the number of each.

    Labelled tokens are taken to be spread evenly over the examples, rounded up.

    Examples:
        >>> parts(BatchShape(examples=10, tokens=7, responses=15), micro_batch=4)
        {BatchShape(examples=4, tokens=7, responses=6): 2, BatchShape(examples=2, tokens=7, responses=3): 1}
    """
    if micro_batch >= shape.examples:
        return {shape: 1}
    whole, rest = divmod(shape.examples, micro_batch)
    sizes = {micro_batch: whole, **({rest: 1} if rest else {})}
    return {
        replace(shape, examples=size, responses=math.ceil(shape.responses * size / shape.examples)): count
        for size, count in sizes.items()
    }


def forward_only(resting: Footprint) -> Footprint:
    """Return the memory without activations of a visit that trains by forward passes alone.

    Examples:
        >>> forward_only(Footprint(base_bytes=288, adapter_bytes=64, gradient_bytes=64, moment_bytes=128))
        Footprint(base_bytes=288, adapter_bytes=128, gradient_bytes=0, moment_bytes=0, activation_bytes=0)
    """
    # The unperturbed adapter is kept beside the perturbed one.
    return Footprint(resting.base_bytes, 2 * resting.adapter_bytes, 0, 0)


def fit(
    shapes: Iterable[BatchShape],
    meter: CostMeter,
    budget_bytes: int,
    resting: Footprint,
    train: Train = "backprop",
) -> Fit:
    """Return the first way that fits a visit: in whole batches, in smaller parts, with activations recomputed as well.

    With ``auto`` forward passes alone come behind all these, in whole batches and in smaller parts.

    Parts halve the largest batch again and again, down to one example, or to those that are computed together. If no way
    fits, the smallest is returned, with ``fits`` False.

    Args:
        shapes: shapes of the visit's batches; at least one.
        meter: meter of the trained module.
        budget_bytes: memory of the device for training.
        resting: memory of the visit by backpropagation without activations, see `resting_footprint`.
        train: ``backprop``, ``forward`` or ``auto``.
    """
    distinct = frozenset(shapes)
    tried = []
    for way in _ways(max(shape.examples for shape in distinct), meter, train):
        micro_batch, checkpointing, forward = way
        each = [part for shape in distinct for part in parts(shape, micro_batch)]
        peak = max(_cost(meter, part, checkpointing, forward).activation_bytes for part in each)
        footprint = replace(forward_only(resting) if forward else resting, activation_bytes=peak)
        tried.append(
            Fit(micro_batch, checkpointing, footprint, footprint.peak_bytes <= budget_bytes, forward)
        )
        if tried[-1].fits:
            return tried[-1]
    return min(tried, key=lambda way: way.footprint.peak_bytes)


def first_that_fits(fits: Sequence[Fit]) -> int:
    """Return the place of the first that fits with backpropagation, else of the first that fits, else the last place.

    The ways are those of one visit with LoRA adapters of falling rank, at least one.
    """
    back = [place for place, way in enumerate(fits) if way.fits and not way.forward]
    forward = [place for place, way in enumerate(fits) if way.fits]
    # Backpropagation with a smaller adapter learns more in a visit than forward passes with a larger one.
    return next(iter(back + forward), len(fits) - 1)


def _ways(examples: int, meter: CostMeter, train: Train) -> Iterator[tuple[int, bool, bool]]:
    """Yield micro-batches, with or without checkpointing, and by forward passes alone or not."""
    back = [(False, False), *([(True, False)] if meter.checkpoints else [])]
    for checkpointing, forward in [
        *(back if train != "forward" else []),
        *([(False, True)] if train != "backprop" else []),
    ]:
        micro_batch = examples
        while True:
            yield micro_batch, checkpointing, forward
            if micro_batch <= meter.together:
                break
            micro_batch = math.ceil(micro_batch / 2 / meter.together) * meter.together


def _cost(meter: CostMeter, part: BatchShape, checkpointing: bool, forward: bool) -> StepCost:
    return meter.forward_cost(part) if forward else meter.cost(part, checkpointing)


def visit_flops(shapes: Iterable[BatchShape], meter: CostMeter, fitted: Fit, perturbations: int = 1) -> int:
    """Return the FLOPs of a visit with one batch for each of the shapes; operations that are recomputed count twice.

    A forward-only visit makes two forward passes for each of its ``perturbations``; drawing these is not counted.
    """
    passes = 2 * perturbations if fitted.forward else 1  # the losses on both sides
    return passes * sum(
        steps * count * _cost(meter, part, fitted.checkpointing, fitted.forward).flops
        for shape, steps in Counter(shapes).items()
        for part, count in parts(shape, fitted.micro_batch).items()
    )
