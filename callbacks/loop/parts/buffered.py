"""Buffered rounds: the server steps when enough updates have arrived, from clients that received older models.

A round is a server step of `FedBuff`. Its visits are those whose updates arrive for it on the virtual clock
(`fedlight.federation.asynchronous.schedule`); each is trained from the model that its client received, and its movement is
relative to that model. A model is kept while a client works on it whose update will arrive: at most one for each client at
work. Learning rates and random draws of the training follow from the round that trains the visit.

A checkpoint holds the clients at work after the last server step, and these models.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from math import inf
from typing import Any

from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor

from fedlight.callbacks.loop import guard
from fedlight.callbacks.loop.devices import DeviceEmulation
from fedlight.callbacks.loop.parts.part import Part
from fedlight.callbacks.loop.round_table import Record
from fedlight.callbacks.loop.run import Run
from fedlight.callbacks.loop.visits.round import OpenRound
from fedlight.callbacks.loop.visits.visit import OpenGroup
from fedlight.devices.clock import IDLE_SECONDS, Outcome, end_of, outcome_of
from fedlight.federation.algorithm import Algorithm, WeightedSum, aggregation_of, has_own
from fedlight.federation.asynchronous.fedbuff import FedBuff
from fedlight.federation.asynchronous.schedule import Assignment, ServerStep, next_step
from fedlight.federation.client import Client, State, Update, Visit

VisitsOf = Callable[[int, Sequence[Client]], list[Visit]]
"""Function from a round and clients that are asked in it to their visits."""
HOOKS_OF_ROUNDS = ("prepare_round", "start_round", "finish_round", "partial", "state_dict")
"""Hooks of an algorithm with a separate state or step for each round, which visits of older models would meet."""


class Buffered(Part):
    """Server steps of `FedBuff`.

    At most ``clients_per_round`` clients train at a time, unless ``fedbuff`` sets another number.
    """

    on_real_devices = False  # those of a deployment: fedlight.flower.loops.arrivals

    def __init__(self, fedbuff: FedBuff, clients_per_round: int, seed: int) -> None:
        self.fedbuff = fedbuff
        self.concurrency = fedbuff.concurrency or clients_per_round
        self.seed = seed
        self._at_work: tuple[Assignment, ...] = ()
        self._models: dict[int, State] = {}
        self._step: ServerStep | None = None
        self._open: list[Outcome] = []

    def check(self, run: Run) -> None:
        refuse_by_round(run.algorithm)
        if not run.has_fleet and not self.on_real_devices:
            raise refusal("fleet.devices is null, which are the nodes of a deployment", "name emulated ones")
        if run.buffers.name == "average":
            raise refusal(
                "AveragedBuffers takes the mean over clients that start from one model's buffers",
                "take LocalBuffers",
            )
        refuse_private(run.is_private)
        for callback in run.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, GradientAccumulationScheduler):
                raise refusal(
                    "a GradientAccumulationScheduler changes the batches of a step between the round in which a client is "
                    "asked and the one in which it is trained",
                    "set trainer.accumulate_grad_batches",
                )

    def meet(self, run: Run) -> None:
        self._clients = run.clients
        at_a_time = "concurrency" if self.fedbuff.concurrency else "clients_per_round"
        settings = {at_a_time: self.concurrency, "buffer_size": self.fedbuff.buffer_size}
        guard.check_cohort(len(run.clients), **settings)

    def plan(
        self,
        round_idx: int,
        now_seconds: float,
        visits_of: VisitsOf,
        devices: DeviceEmulation,
        parameters: Mapping[str, Tensor],
    ) -> list[Visit]:
        """Return the visits of a round that starts at ``now_seconds`` (virtual time), in training order.

        Only names and shapes of the federated ``parameters`` count.
        """
        devices.forget(but={job.client_id for job in self._at_work})  # their costs were drawn before

        def measure(asked: int, names: Sequence[str]) -> None:
            visits = visits_of(asked, [self._clients[name] for name in names])
            # Costs are known when a client is asked, so the batches follow from that round.
            devices.measure(asked, [replace(visit, asked=asked) for visit in visits], parameters)

        def ask(names: list[str], at: float) -> list[Assignment]:
            measure(round_idx, names)
            asked = [devices.jobs[name] for name in names if name in devices.jobs]
            draw = (self.seed, round_idx)
            return [Assignment(job.client_id, round_idx, at, *end_of(job, at, draw)) for job in asked]

        step = self._step = self._next_step(
            round_idx, now_seconds, self._at_work, ask=ask, idle_seconds=IDLE_SECONDS
        )
        ended = (*step.arrivals, *step.dropouts)
        for job in (*ended, *step.at_work):
            if job.client_id not in devices.jobs:  # it was asked before the run was stopped and went on
                measure(job.asked, [job.client_id])
        outcomes = []
        for job in ended:
            spent = job.end_seconds - job.start_seconds if job.reason else inf  # inf: all of its costs
            outcomes.append(outcome_of(devices.jobs[job.client_id], job.reason, spent))
        visits = [visit for job in step.arrivals for visit in devices.visits_to(job.client_id)]
        self._open = [
            outcome_of(devices.jobs[job.client_id], job.reason, step.end_seconds - job.start_seconds)
            for job in step.at_work
        ]
        columns = {job.client_id: columns_of(job, step) for job in ended}
        return devices.take(outcomes, visits, now_seconds, step.end_seconds, columns)

    @property
    def _next_step(self) -> partial[ServerStep]:
        """`next_step` of these clients and settings."""
        clients, size = [*self._clients], self.fedbuff.buffer_size
        return partial(
            next_step, clients=clients, buffer_size=size, concurrency=self.concurrency, seed=self.seed
        )

    def model_for(self, visit: Visit, newest: State) -> State:
        """Return the global parameters that the client of a visit has received."""
        asked = visit.asked_in(self._planned.round_idx)
        if asked == self._planned.round_idx:
            return newest
        model = self._models[asked]
        if others := sorted(model.keys() ^ newest.keys()):
            raise refusal(
                f"{others[0]} and {len(others) - 1} others joined or left the optimizer since client {visit.client_id} was "
                "asked",
                "let the optimizer hold from the start whatever will be trained",
            )
        return model

    def weighed(self, group: OpenGroup, visit: Visit, update: Update) -> Update:
        round_idx = self._planned.round_idx
        factor = self.fedbuff.weight(round_idx - visit.asked_in(round_idx))
        if factor == 1.0:
            return update
        # Not the weight, which is in the divisor: stale updates make a small step, as in FedBuff's paper.
        return replace(update, movement={name: value * factor for name, value in update.movement.items()})

    def finish_round(self, run: Run, round: OpenRound, movement: State) -> dict[str, float]:
        model = round.exchange.state
        step = self._planned
        known = {**self._models, step.round_idx: model}
        # A model stays while a client works on it whose update will arrive.
        self._models = {asked: known[asked] for asked in sorted(step.versions)}
        self._at_work = step.at_work
        kept = [value for model_before in self._models.values() for value in model_before.values()]
        metrics = {
            "at_work": float(len(step.at_work)),
            # Their costs so far are in no row of visits.csv, and those of the last round never get one.
            **{f"at_work_{name}": value for name, value in self._spent().items()},
            "old_models": float(len(self._models)),
            "old_model_bytes": float(sum(value.numel() * value.element_size() for value in kept)),
        }
        stale = [step.staleness(job) for job in step.arrivals]
        return metrics | (
            {"staleness": sum(stale) / len(stale), "staleness_max": float(max(stale))} if stale else {}
        )

    def _spent(self) -> dict[str, float]:
        """Return the costs so far of the clients at work."""
        return {
            "bytes_down": float(sum(job.bytes_down for job in self._open)),
            "bytes_up": float(sum(job.bytes_up for job in self._open)),
            "flops": math.fsum(job.flops for job in self._open),
            "joules": math.fsum(job.joules for job in self._open),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the clients at work and their models: tensors and plain values."""
        return {"at_work": [asdict(job) for job in self._at_work], "models": dict(self._models)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._at_work = tuple(Assignment(**job) for job in state.get("at_work", ()))
        self._models = dict(state.get("models", {}))

    @property
    def _planned(self) -> ServerStep:
        assert self._step is not None
        return self._step


def columns_of(job: Assignment, step: ServerStep) -> Record:
    """Return the further columns of a client's rows in ``visits.csv``."""
    return {
        "asked_round": job.asked,
        "staleness": step.staleness(job),
        "start_seconds": job.start_seconds,
        "arrival_seconds": "" if job.reason else job.end_seconds,
    }


def refusal(reason: str, remedy: str) -> ValueError:
    """Return the error for a setting that does not work with buffered rounds."""
    return ValueError(f"buffered rounds: {reason}: {remedy}, or leave fleet.buffered out")


def refuse_private(is_private: bool) -> None:
    """Raise ValueError for a run that promises differential privacy."""
    if is_private:
        raise refusal(
            "epsilon is computed for cohorts that are drawn uniformly in each round, and here the devices decide who "
            "arrives when",
            "take the private aggregation, ClipAndNoise or DPSGD out",
        )


def refuse_by_round(algorithm: Algorithm) -> None:
    """Raise ValueError for an algorithm tied to single rounds: the visits of a step began in several."""
    kind = type(algorithm)
    remedy = "take FedAvg, FedProx, Ditto, FedRep, FFALoRA or another algorithm without it"
    for hook in HOOKS_OF_ROUNDS:
        if has_own(algorithm, hook):
            raise refusal(
                f"{kind.__name__} has {hook}, so something of it belongs to one round, and the visits of a server step "
                "began in different ones",
                remedy,
            )
    if not isinstance(aggregation_of(algorithm, 1), WeightedSum):
        raise refusal(
            f"{kind.__name__} has an aggregation of its own, no weighted sum of movements, and clients move from different "
            "models",
            remedy,
        )
    client = [Client("any", 1, 1.0)]
    first, second = (
        [visit.part for visit in algorithm.plan(idx, client, lambda client_id, split="train": 1)]
        for idx in (0, 1)  # RoLoRA alternates
    )
    if first != second:
        raise refusal(
            f"{kind.__name__} plans {', '.join(first)} in one round and {', '.join(second)} in the next, and a server step "
            "takes visits of both",
            remedy,
        )
