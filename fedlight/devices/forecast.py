"""What a visit would take of a device, before anything is loaded: does it fit, how long is it, and what would help."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from fedlight.devices.clock import Job
from fedlight.devices.cost import CostMeter
from fedlight.devices.device import WEIGHT_BITS, Device
from fedlight.devices.memory import Fit, Footprint, fit, parts, resting_footprint, visit_flops
from fedlight.devices.shape import BatchShape

SHORTEST_TEXT = 16
"""Texts are not cut below so many tokens in the search for what fits."""


@dataclass(frozen=True)
class Workload:
    """What is asked of every device: equal batches of the longest texts there are.

    Attributes:
        meter: of the module that is trained.
        trained: names of the parameters that a visit trains.
        moment_bytes_per_weight: of the optimizer.
        shape: of each batch.
        num_batches: of a visit.
        bytes_down: from the server.
        bytes_up: to the server.
    """

    meter: CostMeter
    trained: Collection[str]
    moment_bytes_per_weight: float
    shape: BatchShape
    num_batches: int
    bytes_down: int
    bytes_up: int

    def resting(self, weight_bits: int) -> Footprint:
        """Memory without activations, with a base of so many bits."""
        return resting_footprint(self.meter.module, weight_bits, self.moment_bytes_per_weight, self.trained)

    def shortened(self, tokens: int) -> "Workload":
        """The same with texts of so many tokens; the share of labelled ones stays."""
        responses = (
            self.shape.responses * (tokens - 1) // max(1, self.shape.tokens - 1)
        )  # the first is never one
        return replace(self, shape=replace(self.shape, tokens=tokens, responses=responses))


@dataclass(frozen=True)
class Forecast:
    """A visit of one device.

    Attributes:
        device: whose it is.
        fit: how it was made to fit, or the smallest that was found.
        reason: "" if it takes part, else as in :class:`~fedlight.devices.clock.Outcome`: ``out_of_memory``, ``late`` (it
            takes longer than the deadline) or ``left`` (longer than the device ever stays).
        job: what the clock is told.
        joules: of a whole visit.
        rounds_per_day: visits that the device could do one after the other while it is there; 0 where it is out of memory.
    """

    device: Device
    fit: Fit
    reason: str
    job: Job
    joules: float
    rounds_per_day: float


def forecast(device: Device, work: Workload, deadline_seconds: float | None = None) -> Forecast:
    """What a visit would be for a device.

    Args:
        device: of the client.
        work: what is asked.
        deadline_seconds: of a round; None without one.
    """
    batches = [work.shape] * work.num_batches
    found = fit([work.shape], work.meter, device.budget_bytes, work.resting(device.weight_bits))
    flops = visit_flops(batches, work.meter, found)
    job = Job(device.name, device, flops, work.bytes_down, work.bytes_up, found.fits)
    rounds = device.availability.visits_per_day(job.seconds) if found.fits else 0.0
    if not found.fits:
        reason = "out_of_memory"
    elif deadline_seconds is not None and job.seconds > deadline_seconds:
        reason = "late"
    else:
        reason = "" if rounds else "left"
    return Forecast(device, found, reason, job, device.watts * job.seconds, rounds)


@dataclass(frozen=True)
class Remedy:
    """A change with which a device has memory enough: bits of its base, and tokens of the longest text."""

    weight_bits: int
    tokens: int


@dataclass(frozen=True)
class Plan:
    """Forecast of a run's visits on every device: the result of ``fedlight plan``.

    Attributes:
        settings: what a visit was taken to be: model, examples and tokens of a batch, batches, and so on.
        shares: device -> share of the fleet; empty without a fleet.
        forecasts: one for each device.
        remedies: device that is out of memory -> what would let it take part.
        least_base_bytes: what the frozen weights take at 4 bits, below which nothing helps.
    """

    settings: dict[str, Any]
    shares: dict[str, float]
    forecasts: list[Forecast]
    remedies: dict[str, list[Remedy]]
    least_base_bytes: int


def remedies(device: Device, work: Workload) -> list[Remedy]:
    """What would let a device take part that is out of memory, by trying.

    Fewer bits, as many as possible; shorter texts, halved until they fit; both only where neither helps alone.

    Returns:
        At most two; none where nothing helps.
    """
    longest = work.shape.tokens
    fewer = (Remedy(bits, longest) for bits in WEIGHT_BITS if bits < device.weight_bits)
    alone = [_first(device, work, fewer), _first(device, work, _shorter(device.weight_bits, longest))]
    found = [remedy for remedy in alone if remedy is not None]
    if not found and (both := _first(device, work, _shorter(WEIGHT_BITS[-1], longest))) is not None:
        found = [both]
    return found


def _shorter(weight_bits: int, tokens: int) -> Iterator[Remedy]:
    while (tokens := tokens // 2) >= SHORTEST_TEXT:
        yield Remedy(weight_bits, tokens)


def _first(device: Device, work: Workload, changes: Iterator[Remedy]) -> Remedy | None:
    """The first change with which the device has memory enough for one example at a time."""
    for change in changes:
        resting = work.resting(change.weight_bits)
        if resting.peak_bytes < device.budget_bytes:
            (one,) = parts(work.shortened(change.tokens).shape, micro_batch=1)
            if fit([one], work.meter, device.budget_bytes, resting).fits:
                return change
    return None
