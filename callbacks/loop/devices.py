"""Emulated devices in the federated loop: the clients that get through a round, their bases, their costs.

This is decided before a round, from counted operations and bytes and from the devices' hours, so no client trains in vain.
"""

import logging
import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from fedlight.callbacks.loop.fitted_step import FittedStep
from fedlight.callbacks.loop.plan import batches_per_step
from fedlight.callbacks.loop.round_table import Record
from fedlight.callbacks.loop.run import NO_WORK, NoDevices, Run, ready, visit_row
from fedlight.devices.clock import Job, Outcome, run_round
from fedlight.devices.cost import CostMeter
from fedlight.devices.fleet import Fleet
from fedlight.devices.memory import (
    Fit,
    Footprint,
    Train,
    first_that_fits,
    fit,
    moment_bytes_per_weight,
    resting_footprint,
    visit_flops,
)
from fedlight.devices.outcomes import REASONS
from fedlight.devices.quantization import QuantizedBase
from fedlight.devices.shape import BatchShape
from fedlight.federation.client import Client, State, Visit
from fedlight.federation.lora.ranks import largest_rank, rank_of
from fedlight.federation.payloads import predict_payloads
from fedlight.federation.protocols import FederatedData, KnowsBaseBits


class Counted(NamedTuple):
    """Counted costs of a visit: ``lora_rank`` None is the module's, and ``is_cut`` says whether batches run in parts."""

    fit: Fit
    is_cut: bool
    flops: int
    bytes_down: int
    bytes_up: int
    lora_rank: int | None


logger = logging.getLogger("fedlight")


@runtime_checkable
class KnowsBatchShapes(Protocol):
    """Datamodule that knows the size of its batches before they are read."""

    def batch_shapes(self, visit: Visit, round_idx: int) -> list[BatchShape]:
        """Return the size of each batch of a visit."""

    def example_batch(self, examples: int) -> Any:
        """Return a batch of ``examples`` examples."""


class DeviceEmulation(NoDevices):
    """Emulated devices of a federated run.

    Attributes:
        jobs: client id -> cost of its visits on its device, of those that `measure` has counted.

    Args:
        wanted: number of clients that a round needs; if more are asked, the fastest count.
        run: the run, with its clients, data and module.
        perturbations: directions of a step of a forward-only visit; 0 where there are none.

    Raises:
        ValueError: the datamodule does not know the size of its batches, or the base cannot serve a device.
    """

    def __init__(self, fleet: Fleet, wanted: int, run: Run, perturbations: int = 0) -> None:
        if not isinstance(run.data, KnowsBatchShapes):
            raise ValueError(
                f"fleet: {type(run.data).__name__} does not say how large its batches are: derive it from "
                "FederatedDataModule or wrap it, FederatedWrapper(datamodule, clients=...)"
            )
        self._data: KnowsBatchShapes = run.data
        self._train: Train = run.train
        self._perturbations = perturbations
        self._run = run
        self._devices = fleet.assign(run.clients)
        self._names = [*fleet.devices]
        self._deadline_seconds = fleet.deadline_seconds
        self._wanted = wanted
        self._seed = run.seed
        self._said = False
        module = run.lightning_module
        self._module = module
        self._base = QuantizedBase(module)
        for bits in sorted({device.weight_bits for device in self._devices.values()}):
            self._base.check(bits)
        self._step = FittedStep(module)
        self._meters: dict[int | None, CostMeter] = {}
        self._moment_bytes = max(moment_bytes_per_weight(optimizer) for optimizer in run.optimizers)
        self._resting: dict[tuple[int, frozenset[str], int | None], Footprint] = {}
        self._meter(None)
        self.jobs: dict[str, Job] = {}
        self._counted: dict[str, dict[Visit, Counted]] = {}
        self._trained = _trained(run.parameters)  # as the meters see it

    def _meter(self, lora_rank: int | None) -> CostMeter:
        """Return the meter of steps with adapters of a rank; None for the module's."""
        if lora_rank is not None and lora_rank >= self._full_rank:
            lora_rank = None
        if lora_rank not in self._meters:
            self._meters[lora_rank] = CostMeter(self._module, self._example_batch, lora_rank)
        return self._meters[lora_rank]

    def _example_batch(self, examples: int) -> Any:
        """Return a batch as a training step receives it, on the CPU, where its operations are counted."""
        return ready(self._module, self._data.example_batch(examples), torch.device("cpu"))

    def device_name(self, client_id: str) -> str:
        return self._devices[client_id].name

    @cached_property
    def _full_rank(self) -> int:
        return largest_rank({name: p for name, p in self._module.named_parameters() if p.requires_grad})

    @property
    def device_names(self) -> list[str]:
        return self._names

    def fitting_rank(self, client_id: str, ranks: Sequence[int], parameters: Mapping[str, Tensor]) -> int:
        device, trained = self._devices[client_id], frozenset(parameters)
        assert isinstance(self._data, FederatedData)  # as that of every run of the loop
        shapes = self._data.batch_shapes(Visit(client_id, self._data.num_batches(client_id)), 0)
        falling = sorted({*ranks}, reverse=True)
        fits = [
            fit(
                shapes,
                self._meter(rank),
                device.budget_bytes,
                self._at_rest(device.weight_bits, trained, rank),
                self._train,
            )
            for rank in falling
        ]
        return falling[first_that_fits(fits)]

    def present(self, round_idx: int, now_seconds: float, clients: Sequence[Client]) -> list[Client]:
        def there(client: Client) -> bool:
            hours, draw = self._devices[client.id].availability, (self._seed, round_idx, client.id)
            return hours.available_until(now_seconds, *draw) is not None

        return [client for client in clients if there(client)]

    def by_base(self, clients: Sequence[Client]) -> Iterator[list[Client]]:
        by_bits: dict[int, list[Client]] = {}
        for client in clients:
            by_bits.setdefault(self._devices[client.id].weight_bits, []).append(client)
        try:
            for bits in sorted(by_bits, reverse=True):
                self._use_base(bits)
                yield by_bits[bits]
        finally:
            self._use_base(self._base.own_bits)  # also where the caller breaks off

    @contextmanager
    def at_server(self) -> Iterator[None]:
        before = self._base.bits
        self._use_base(self._base.own_bits)
        try:
            yield
        finally:
            self._use_base(before)

    def admit(
        self, round_idx: int, now_seconds: float, visits: Sequence[Visit], parameters: Mapping[str, Tensor]
    ) -> list[Visit]:
        self.forget()
        self.measure(round_idx, visits, parameters)
        draw = (self._seed, round_idx)
        outcomes, seconds = run_round(
            now_seconds, [*self.jobs.values()], self._wanted, self._deadline_seconds, draw
        )
        return self.take(outcomes, visits, now_seconds, now_seconds + seconds)

    def measure(self, round_idx: int, visits: Sequence[Visit], parameters: Mapping[str, Tensor]) -> None:
        """Count memory, operations and bytes of all visits of some clients, for the round that asks them."""
        self._planned_for = parameters.keys()
        # Costs follow from shapes: hooks that read values are refused.
        state = {name: torch.empty(p.shape, device="meta") for name, p in parameters.items()}
        asked: dict[str, list[Visit]] = {}
        for visit in visits:
            asked.setdefault(visit.client_id, []).append(visit)
        for client_id, theirs in asked.items():
            self._counted[client_id] = self._count(client_id, theirs, state, round_idx)
            costs = self._counted[client_id].values()
            self.jobs[client_id] = Job(
                client_id,
                self._devices[client_id],
                flops=sum(each.flops for each in costs),
                bytes_down=sum(each.bytes_down for each in costs),
                bytes_up=sum(each.bytes_up for each in costs),
                fits=all(each.fit.fits for each in costs),
            )

    def _count(
        self, client_id: str, visits: Sequence[Visit], state: State, round_idx: int
    ) -> dict[Visit, Counted]:
        """Return the costs of each visit to a client in a round, given the shapes of ``state``."""
        run, device = self._run, self._devices[client_id]
        client = replace(run.clients[client_id], memory=run.memory.load(client_id))
        rank = rank_of(client)
        meter = self._meter(rank)
        shared, also = run.buffers.shared(state), run.buffers.num_bytes
        local = state.keys() - shared.keys()  # trained, never sent: the layers of FedBN
        gone = self._perturbations / batches_per_step(run.trainer, round_idx)
        payloads = predict_payloads(run.algorithm, visits, client, shared, gone)
        counted = {}
        for visit, payload in zip(visits, payloads, strict=True):
            shapes = self._data.batch_shapes(visit, round_idx)
            resting = self._at_rest(device.weight_bits, frozenset(payload.start.keys() | local), rank)
            fitted = fit(shapes, meter, device.budget_bytes, resting, self._train)
            is_cut = fitted.micro_batch < max(shape.examples for shape in shapes)
            flops = visit_flops(shapes, meter, fitted, self._perturbations)
            # As `Exchange` counts them: buffers travel with something else alone.
            down = run.channel.down_bytes(payload.down) + (also if payload.down else 0)
            up = run.channel.up_bytes(payload.up) + (also if payload.up else 0)
            counted[visit] = Counted(fitted, is_cut, flops, down, up, rank)
        return counted

    def _costs(self, visit: Visit) -> Counted:
        return self._counted[visit.client_id][visit]

    def forget(self, but: Collection[str] = ()) -> None:
        """Forget all measurements, except those of the clients ``but``."""
        self.jobs = {name: job for name, job in self.jobs.items() if name in but}
        self._counted = {name: counted for name, counted in self._counted.items() if name in but}

    def visits_to(self, client_id: str) -> list[Visit]:
        """Return the measured visits to a client, none where it has none."""
        return [*self._counted.get(client_id, {})]

    def take(
        self,
        outcomes: Sequence[Outcome],
        visits: Sequence[Visit],
        start_seconds: float,
        end_seconds: float,
        columns: Mapping[str, Record] = MappingProxyType({}),
    ) -> list[Visit]:
        """Begin a round with the outcomes of all clients whose work ends in it, from and to these virtual times.

        Return those of their measured visits that get through, in training order; ``columns`` are further ones of a client's
        rows.
        """
        self._outcomes, self._columns = outcomes, columns
        self._start, self.round_end_seconds = start_seconds, end_seconds
        there = {outcome.client_id for outcome in outcomes if not outcome.reason}
        left = [visit for visit in visits if visit.client_id in there]
        # The base is swapped as rarely as possible.
        return sorted(left, key=lambda visit: -self._devices[visit.client_id].weight_bits)

    def check_parameters(self, parameters: Mapping[str, Tensor]) -> None:
        others = sorted((parameters.keys() ^ self._planned_for) | (_trained(parameters) ^ self._trained))
        if others:
            raise ValueError(
                f"fleet: {others[0]} and {len(others) - 1} others joined or left the optimizer, or were frozen or thawed, "
                "after the memory and the bytes of the round were planned: let the optimizer hold from the start, unfrozen, "
                "whatever will be trained, or take fleet out"
            )

    def _at_rest(self, weight_bits: int, trained: frozenset[str], lora_rank: int | None) -> Footprint:
        key = (weight_bits, trained, lora_rank)
        if key not in self._resting:
            module = self._meter(lora_rank).module
            self._resting[key] = resting_footprint(module, weight_bits, self._moment_bytes, trained)
        return self._resting[key]

    def kind(self, visit: Visit) -> Hashable:
        """Return bits, checkpointing, and whether training is forward-only; None for a visit that must train alone."""
        bits = self._devices[visit.client_id].weight_bits
        fitted, is_cut, *_ = self._costs(visit)
        # LLM.int8 picks outlier columns over the whole batch, so the clients beside would change them.
        return None if is_cut or bits == 8 else (bits, fitted.checkpointing, fitted.forward)

    def trains_forward(self, visit: Visit) -> bool:
        return self._costs(visit).fit.forward

    def enter(self, visit: Visit) -> None:
        fitted, is_cut, *_ = self._costs(visit)
        self._use_base(self._devices[visit.client_id].weight_bits)
        self._step.enter(fitted.micro_batch if is_cut else None, fitted.checkpointing)

    def restore(self) -> None:
        self._step.leave()
        self._use_base(self._base.own_bits)

    def _use_base(self, bits: int) -> None:
        self._base.use(bits)
        if isinstance(self._module, KnowsBaseBits):
            self._module.base_bits = bits

    def visited(self, visit: Visit, row: Record) -> Record:
        device, costs = self._devices[visit.client_id], self._costs(visit)
        sent, planned = (row["bytes_down"], row["bytes_up"]), (costs.bytes_down, costs.bytes_up)
        if sent != planned and not row["reason"] and not self._said:  # a diverged client sends nothing
            self._said = True
            logger.warning(
                "%s was to send %s bytes down and up by names and shapes, and client %s had %s: the clock of its rounds is "
                "off by that. Its send, start_visit and reply must not depend on values, nor on what start_round changes",
                *(type(self._run.algorithm).__name__, planned, visit.client_id, sent),
            )
        seconds = {
            "download_seconds": device.download_seconds(int(row["bytes_down"])),
            "compute_seconds": device.compute_seconds(costs.flops),
            "upload_seconds": device.upload_seconds(int(row["bytes_up"])),
        }
        spent = {"flops": costs.flops, **seconds, "joules": device.watts * sum(seconds.values())}
        return self._row(visit, row, spent)

    def dropouts(self, round_idx: int) -> list[Record]:
        rows = []
        for outcome in self._outcomes:
            if outcome.reason:
                counted = self._counted[outcome.client_id].items()
                visit, costs = max(counted, key=lambda each: each[1].fit.footprint.peak_bytes)
                sent = outcome.bytes_down, outcome.bytes_up
                examples = self._run.num_examples(visit)
                done = visit_row(round_idx, visit, examples, NO_WORK, *sent, outcome.reason, costs.lora_rank)
                rows.append(self._row(visit, done, _spent(outcome)))
        return rows

    def _row(self, visit: Visit, row: Record, spent: Mapping[str, float]) -> Record:
        device, fitted = self._devices[visit.client_id], self._costs(visit).fit
        return {
            **row,
            "device": device.name,
            "weight_bits": device.weight_bits,
            "micro_batch": fitted.micro_batch,
            "checkpointing": int(fitted.checkpointing),
            **({} if self._train == "backprop" else {"train": "forward" if fitted.forward else "backprop"}),
            **asdict(fitted.footprint),
            "peak_bytes": fitted.footprint.peak_bytes,
            "budget_bytes": device.budget_bytes,
            **spent,
            "round_start_seconds": self._start,
            "round_end_seconds": self.round_end_seconds,
            **self._columns.get(visit.client_id, {}),
        }

    def metrics(self, rows: Sequence[Record]) -> dict[str, float]:
        reasons = Counter(outcome.reason for outcome in self._outcomes)
        return {
            "hours": self.round_end_seconds / 3600,
            "round_seconds": self.round_end_seconds - self._start,
            "joules": math.fsum(float(row["joules"]) for row in rows),  # in any order
            "asked": float(len(self._outcomes)),
            **{reason: float(reasons[reason]) for reason in REASONS},
        }


def _spent(outcome: Outcome) -> dict[str, float]:
    names = ("flops", "download_seconds", "compute_seconds", "upload_seconds", "joules")
    return {name: getattr(outcome, name) for name in names}


def _trained(parameters: Mapping[str, Tensor]) -> set[str]:
    return {name for name, parameter in parameters.items() if parameter.requires_grad}
