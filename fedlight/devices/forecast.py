"""Forecast of a visit before anything is loaded: whether it fits a device, its duration, and remedies."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fedlight.devices.clock import Job
from fedlight.devices.cost import CostMeter
from fedlight.devices.device import WEIGHT_BITS, Device
from fedlight.devices.memory import (
    Fit,
    Footprint,
    Train,
    first_that_fits,
    fit,
    forward_only,
    parts,
    resting_footprint,
    visit_flops,
)
from fedlight.devices.shape import BatchShape

SHORTEST_TEXT = 16
"""Least number of tokens to which texts are cut in the search for what fits."""


@dataclass(frozen=True)
class Workload:
    """Work of a visit: equal batches of the longest texts; the parameters named by ``trained`` learn.

    All is counted at ``lora_rank``, the client's; None where all clients have the module's. ``train`` and ``perturbations``
    are those of `fedlight.devices.memory.fit` and `visit_flops`.
    """

    meter: CostMeter
    trained: Collection[str]
    moment_bytes_per_weight: float
    shape: BatchShape
    num_batches: int
    bytes_down: int
    bytes_up: int
    lora_rank: int | None = None
    train: Train = "backprop"
    perturbations: int = 1

    def resting(self, weight_bits: int, number_bytes: int = 2) -> Footprint:
        """Return the memory without activations, with a base of so many bits; see `resting_footprint`."""
        moments = self.moment_bytes_per_weight
        return resting_footprint(self.meter.module, weight_bits, moments, self.trained, number_bytes)

    def shortened(self, tokens: int) -> "Workload":
        """Return the same work with texts of so many tokens and the same share of labelled ones."""
        # The first token of a text is never labelled.
        responses = self.shape.responses * (tokens - 1) // max(1, self.shape.tokens - 1)
        return replace(self, shape=replace(self.shape, tokens=tokens, responses=responses))


@dataclass(frozen=True)
class Forecast:
    """Forecast of a visit on one device.

    Attributes:
        device: the device.
        fit: how the visit was made to fit, or the smallest way if it does not.
        reason: "" if the device takes part, else as in `Outcome`: ``out_of_memory``, ``late``
            (it takes longer than the deadline) or ``left`` (longer than the device ever stays); or ``never``, if the
            device is available at no time.
        job: the visit as the clock takes it.
        joules: energy of a whole visit.
        rounds_per_day: visits that the device could do one after the other while it is available; 0 if out of memory.
        lora_rank: LoRA rank of a client with this device; None where all clients have the module's.
        forward_fits: whether a device without room for backpropagation could train by forward passes alone.
    """

    device: Device
    fit: Fit
    reason: str
    job: Job
    joules: float
    rounds_per_day: float
    lora_rank: int | None = None
    forward_fits: bool = False


def forecast(device: Device, work: Workload, deadline_seconds: float | None = None) -> Forecast:
    """Return the forecast of a visit; ``deadline_seconds`` is that of a round, None without one."""
    batches = [work.shape] * work.num_batches
    resting = work.resting(device.weight_bits)
    fits = partial(fit, [work.shape], meter=work.meter, budget_bytes=device.budget_bytes, resting=resting)
    fitted = fits(train=work.train)
    flops = visit_flops(batches, work.meter, fitted, work.perturbations)
    job = Job(device.name, device, flops, work.bytes_down, work.bytes_up, fitted.fits)
    rounds = device.availability.visits_per_day(job.seconds) if fitted.fits else 0.0
    forward_fits = False
    if not fitted.fits:
        reason = "out_of_memory"
        has_room = forward_only(resting).peak_bytes < device.budget_bytes  # else no step need be counted
        forward_fits = work.train == "backprop" and has_room and fits(train="forward").fits
    elif deadline_seconds is not None and job.seconds > deadline_seconds:
        reason = "late"
    else:
        reason = "" if rounds else "left" if device.availability.visits_per_day(1e-6) else "never"
    return Forecast(
        device, fitted, reason, job, device.watts * job.seconds, rounds, work.lora_rank, forward_fits
    )


def forecast_at_largest(
    device: Device, works: Sequence[Workload], deadline_seconds: float | None = None
) -> tuple[Forecast, Workload]:
    """Return the forecast with the largest LoRA rank that fits, by `first_that_fits`, and the work at that rank.

    ``works`` are equal but for their ranks, at least one.
    """
    falling = sorted(works, key=lambda work: work.lora_rank or 0, reverse=True)
    forecasts = [forecast(device, work, deadline_seconds) for work in falling]
    place = first_that_fits([result.fit for result in forecasts])
    return forecasts[place], falling[place]


@dataclass(frozen=True)
class Remedy:
    """Change that gives a device enough memory: bits of its base, and tokens of the longest text."""

    weight_bits: int
    tokens: int


@dataclass(frozen=True)
class Plan:
    """Forecast of a run's visits on every device: the result of ``fedlight plan``.

    Attributes:
        settings: assumptions about a visit: model, examples and tokens of a batch, batches, and so on.
        shares: device -> share of the fleet; empty without a fleet.
        forecasts: one for each device.
        remedies: device that is out of memory -> changes that would let it take part.
        least_base_bytes: bytes of the frozen weights at 4 bits; no change helps below these.
    """

    settings: dict[str, Any]
    shares: dict[str, float]
    forecasts: list[Forecast]
    remedies: dict[str, list[Remedy]]
    least_base_bytes: int


def remedies(device: Device, work: Workload) -> list[Remedy]:
    """Return at most two changes, found by trying, that would let a device that is out of memory take part.

    They are as many bits as possible below the device's, and texts halved until they fit; both at once only where neither
    helps alone.
    """
    longest = work.shape.tokens
    fewer = (Remedy(bits, longest) for bits in WEIGHT_BITS if bits < device.weight_bits)
    alone = [_first(device, work, fewer), _first(device, work, _shorter(device.weight_bits, longest))]
    changes = [remedy for remedy in alone if remedy is not None]
    if not changes and (both := _first(device, work, _shorter(WEIGHT_BITS[-1], longest))) is not None:
        changes = [both]
    return changes


def _shorter(weight_bits: int, tokens: int) -> Iterator[Remedy]:
    while (tokens := tokens // 2) >= SHORTEST_TEXT:
        yield Remedy(weight_bits, tokens)


def _first(device: Device, work: Workload, changes: Iterator[Remedy]) -> Remedy | None:
    """Return the first change that gives the device enough memory for one example at a time."""
    for change in changes:
        resting = work.resting(change.weight_bits)
        least = resting if work.train == "backprop" else forward_only(resting)
        if least.peak_bytes < device.budget_bytes:  # else no step need be counted
            (smallest,) = parts(work.shortened(change.tokens).shape, micro_batch=1)
            if fit([smallest], work.meter, device.budget_bytes, resting, work.train).fits:
                return change
    return None
