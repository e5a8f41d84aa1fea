"""Plan of a round: the clients that are asked, their visits, and the place of each visit in the stream of batches.

A group has visits of different clients with equally many batches of the same kind, which are trained side by side. A bundle
has the groups over the same clients in the order of their visits: a client's second visit may need the result of its first,
so a bundle is trained in one place, and in this order.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import lightning as L
import numpy as np
from lightning.pytorch.callbacks import Checkpoint, GradientAccumulationScheduler
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from fedlight.callbacks.loop.run import Run, seed_all
from fedlight.callbacks.loop.visits.round import RoundSchedule
from fedlight.devices.shape import BatchShape
from fedlight.federation.algorithm import Algorithm
from fedlight.federation.algorithms.lora.unlike_ranks import UnlikeRanks
from fedlight.federation.client import Client, Group, Visit, cohort_in_turn, uniform_cohort
from fedlight.federation.lora.ranks import largest_rank, ranks_by_hand
from fedlight.federation.protocols import FederatedData, Federation, NumBatches, StreamsGroups
from fedlight.processes.team import current_team, share
from fedlight.support.pokes import may_stop
from fedlight.support.words import count_noun

STEP_TOKENS = 128
"""Tokens in whose time a small model computes what a step costs beside them: the optimizer, hooks, Python."""
Bundle = tuple[Group, ...]
"""Groups that follow each other: the first visits of some clients, then their second visits, and so on."""
Kind = Callable[[Visit], Hashable]
"""Function from a visit to its kind: visits of one kind can be trained side by side; None: only alone."""


def batches_per_step(trainer: L.Trainer, round_idx: int) -> int:
    """Return the batches of an optimizer step in a round, from a ``GradientAccumulationScheduler`` if there is one."""
    number = trainer.accumulate_grad_batches
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler):
            number = callback.get_accumulate_grad_batches(round_idx)
    return number


def visit_lengths(local_steps: int | None, accumulation: int, one_pass: NumBatches) -> NumBatches:
    """Return a function from client id and split to the number of batches of a visit.

    Args:
        local_steps: optimizer steps; None for one pass over the client's data, cut to whole steps.
        accumulation: batches of an optimizer step.
        one_pass: function from client id and split to the batches of one pass.

    Examples:
        >>> visit_lengths(None, 2, lambda client_id, split="train": 5)("a")
        4
    """

    def num_batches(client_id: str, split: str = "train") -> int:
        steps = local_steps or max(1, one_pass(client_id, split) // accumulation)
        return steps * accumulation

    return num_batches


def number_asked(wanted: int, over_selection: float) -> int:
    """Return the number of clients to ask so that ``wanted`` of them remain.

    Examples:
        >>> number_asked(100, 1.1), number_asked(8, 1.3)
        (110, 11)
    """
    return math.ceil(round(wanted * over_selection, 9))  # 100 * 1.1 = 110.00000000000001


def takes_place(trainer: L.Trainer, round_idx: int) -> bool:
    """Return whether the round will be trained: it is not after the last, and the trainer is not asked to stop."""
    stops = trainer.should_stop and may_stop(trainer)
    return round_idx < (trainer.max_epochs or 0) and not stops


def give_lora_ranks(algorithm: Algorithm, run: Run, parameters: Mapping[str, Tensor]) -> None:
    """Give each client of an algorithm for unlike ranks its LoRA rank.

    It is the one set for it or its device, or the largest of a list that fits its device, or that of the module.

    Raises:
        ValueError: the module has no plain LoRA adapter or one of a smaller rank; a name is of no client and no device.
    """
    if not isinstance(algorithm, UnlikeRanks):
        return
    ranks, clients, devices = algorithm.ranks, run.clients, run.devices
    largest = largest_rank(parameters, ranks)
    rank_of = dict.fromkeys(clients, largest)
    if isinstance(ranks, Mapping):
        names = {name: devices.device_name(name) for name in clients}
        rank_of = ranks_by_hand(ranks, names, devices.device_names, largest)
    elif ranks is not None:
        rank_of = {name: devices.fitting_rank(name, ranks, parameters) for name in clients}
    for name, client in clients.items():
        client.lora_rank = rank_of[name]


def say_if_over(trainer: L.Trainer, rounds_done: int) -> None:
    """Say that nothing is trained where all rounds are done, and warn of schedules that do not go on with the rounds."""
    if rounds_done and trainer.ckpt_path is None and trainer.lr_scheduler_configs:
        rank_zero_warn(
            f"this fit goes on after round {rounds_done}, but Lightning begins the schedules of the learning rate anew: "
            "give fit the ckpt_path of a checkpoint, which has them"
        )
    if rounds_done >= (trainer.max_epochs or 0) > 0:
        rank_zero_info(
            f"all {rounds_done} rounds are done, so nothing is trained: to go on, raise "
            f"trainer.max_epochs={trainer.max_epochs}"
        )


def close_epoch(trainer: L.Trainer) -> None:
    """Make Lightning go on after the batches of an epoch whose checkpoint was taken after validation."""
    # Lightning compares these numbers with the next epoch, and would train a part of a longer round.
    done: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    done.ready = done.started = done.processed = done.completed = int(trainer.num_training_batches)


@runtime_checkable
class KnowsLengths(Protocol):
    """Data that know the tokens of their batches before they are read; ``train_lengths``: None where they are no texts."""

    train_lengths: np.ndarray | None

    def batch_shapes(self, visit: Visit, round_idx: int) -> list[BatchShape]:
        """Return the shape of each batch of a visit."""


def visit_cost(data: object, visit: Visit, round_idx: int) -> float:
    """Return the relative cost of a visit: its tokens with padding, else its batches."""
    if not isinstance(data, KnowsLengths) or data.train_lengths is None:
        return float(visit.num_batches)
    shapes = data.batch_shapes(visit, round_idx)
    return float(sum(shape.examples * shape.tokens + STEP_TOKENS for shape in shapes))


def form_bundles(visits: Sequence[Visit], at_once: int, kind: Kind = lambda visit: ()) -> list[Bundle]:
    """Return the bundles of a round, by the first visit of their clients in the plan.

    Args:
        visits: all visits of the round in the order of the plan.
        at_once: most visits in a group, at least 1; with 1 the order of the plan stays.
        kind: see `Kind`.

    Examples:
        >>> visits = [Visit("b", 2), Visit("a", 2), Visit("c", 3), Visit("d", 2)]
        >>> [[[v.client_id for v in group] for group in bundle] for bundle in form_bundles(visits, 2)]
        [[['a', 'b']], [['d']], [['c']]]
    """
    by_client: dict[str, list[Visit]] = {}
    for visit in visits:
        by_client.setdefault(visit.client_id, []).append(visit)
    alike: dict[Hashable, list[str]] = {}
    for name, theirs in by_client.items():
        kinds = [kind(visit) for visit in theirs]
        alone = at_once == 1 or None in kinds
        key = name if alone else tuple((v.num_batches, k) for v, k in zip(theirs, kinds, strict=True))
        alike.setdefault(key, []).append(name)
    bundles: list[Bundle] = []
    for names in alike.values():
        names.sort()  # so that no order of the clients decides who shares a group
        for start in range(0, len(names), at_once):
            own_visits = [by_client[name] for name in names[start : start + at_once]]
            bundles.append(tuple(zip(*own_visits, strict=True)))
    return bundles


@runtime_checkable
class PreparesRounds(Protocol):
    """Algorithm that does something before the visits of a round can be planned, such as having clients make data."""

    def prepare_round(self, round_idx: int, cohort: Sequence[Client], federation: Federation) -> None:
        """Prepare a round; the module holds the global state.

        The cohort is all who are asked and present; with a fleet some of them may not get through. Random streams are seeded
        for this round, and draws here change none elsewhere.
        """


class RoundPlanner:
    """Planner of the rounds, whose visits the datamodule streams.

    Args:
        loop: the `FederatedLoop`, whose module imports this one.
        data: where the visits are streamed from.
        trainer: with the batches of an optimizer step.

    Attributes:
        num_asked: number of clients asked in a round.
        cohort: clients that take part in the last planned round.
        bundles: groups of visits of the last planned round, in training order.
        everything: their places in the stream of batches, if one process trained them all.
        schedule: groups that this process trains, by their places in its stream of batches.
        planned: last planned round; None before the first.
        accumulation: function from a round to its batches per optimizer step.
        at_once: function from the visits of a round, their kinds and the round to the most clients of a group; None: one.
        buffered: `Buffered` rounds, which say whose visits a round has; None: a cohort is asked, and all of it counts.
        in_turn: whether clients take part in turn, and not by lot.
    """

    cohort: list[Client]
    bundles: list[Bundle]
    everything: RoundSchedule
    schedule: RoundSchedule

    def __init__(self, loop: Any, data: FederatedData, trainer: L.Trainer) -> None:
        self.algorithm: Algorithm = loop.algorithm
        self.data = data
        self.clients: Mapping[str, Client] = loop.clients
        over_selection = 1.0 if loop.fleet is None else loop.fleet.over_selection
        self.num_asked = min(len(self.clients), number_asked(loop.clients_per_round, over_selection))
        self.local_steps: int | None = loop.local_steps
        self.accumulation = partial(batches_per_step, trainer)
        self.seed: int = loop.seed
        self.at_once = None if loop._at_once is None else loop._at_once.number
        self.buffered, self.team = loop._buffered, current_team()
        self.in_turn: bool = getattr(loop.aggregation, "in_turn", False)
        self.planned: int | None = None

    def outline(self, round_idx: int, accumulation: int) -> None:
        """Give the data a plan of one visit, as long as the longest of all clients, before the first round is planned.

        ``trainer.estimated_stepping_batches`` is then the number of steps of a schedule that continues from round to round,
        or slightly more where visits differ in length.
        """
        num_batches = visit_lengths(self.local_steps, accumulation, self.data.num_batches)
        passes = {client: self.data.num_batches(client) for client in self.clients}
        cut = [client for client, number in passes.items() if number > accumulation and number % accumulation]
        if self.local_steps is None and cut:
            rank_zero_info(
                f"trainer.accumulate_grad_batches={accumulation}: the passes of {count_noun(len(cut), 'client')} are cut to "
                f"whole optimizer steps, so up to {accumulation - 1} of the batches of a pass are not seen"
            )
        visits = self._whole(self.algorithm.plan(round_idx, [*self.clients.values()], num_batches))
        nobody = Visit(next(iter(self.clients)), accumulation)
        self.data.set_visits([max(visits, key=lambda visit: visit.num_batches, default=nobody)], round_idx)

    def plan(self, round_idx: int, run: Run, parameters: Mapping[str, Tensor], now_seconds: float) -> None:
        """Plan the visits of a round that starts at ``now_seconds`` (virtual time), and give them to the data."""
        if self.planned != round_idx:
            self._prepare(round_idx, now_seconds, run)
            self.planned = round_idx
        accumulation = self.accumulation(round_idx)
        if self.buffered is None:
            visits = self.visits_of(round_idx, self.asked(round_idx))
            visits = run.devices.admit(round_idx, now_seconds, visits, parameters)
        else:
            visits = self.buffered.plan(round_idx, now_seconds, self.visits_of, run.devices, parameters)
        self.cohort = [self.clients[name] for name in sorted({visit.client_id for visit in visits})]
        at_once = 1 if self.at_once is None else self.at_once(visits, run.devices.kind, round_idx)
        self.bundles = form_bundles(visits, at_once, run.devices.kind)
        groups = [group for bundle in self.own_bundles(round_idx) for group in bundle]
        self.everything = RoundSchedule([group for bundle in self.bundles for group in bundle], accumulation)
        self.schedule = RoundSchedule(groups, accumulation)
        # Lightning ends a run at an epoch without batches.
        groups = groups or [(Visit(next(iter(self.clients)), accumulation),)]
        if at_once == 1:
            self.data.set_visits([visit for (visit,) in groups], round_idx)
        else:
            assert isinstance(self.data, StreamsGroups)  # checked in setup
            self.data.set_groups(groups, round_idx)

    def own_bundles(self, round_idx: int) -> list[Bundle]:
        """Return the bundles of a planned round that this process trains."""
        if self.team.seats == 1:
            return self.bundles
        costs = [
            sum(visit_cost(self.data, visit, round_idx) for group in bundle for visit in group)
            for bundle in self.bundles
        ]
        seats = share(costs, self.team.seats)
        return [bundle for bundle, seat in zip(self.bundles, seats, strict=True) if seat == self.team.seat]

    @property
    def begins(self) -> list[int]:
        """Numbers of the first batches of visits, in one process or in this one."""
        return [*self.everything.begins, *self.schedule.begins]

    def visits_of(self, round_idx: int, clients: Sequence[Client]) -> list[Visit]:
        """Return the visits that the algorithm plans for the clients asked in a round."""
        num_batches = visit_lengths(self.local_steps, self.accumulation(round_idx), self.data.num_batches)
        return self._whole(self.algorithm.plan(round_idx, clients, num_batches))

    def _whole(self, visits: Sequence[Visit]) -> list[Visit]:
        """Return visits that see every example of a client where their length is that of passes."""
        return [replace(visit, whole_passes=self.local_steps is None) for visit in visits]

    def _prepare(self, round_idx: int, now_seconds: float, run: Run) -> None:
        """Let the algorithm prepare the round for the clients that are present; keep every random stream as it was."""
        if isinstance(self.algorithm, PreparesRounds):
            there = run.devices.present(round_idx, now_seconds, self.asked(round_idx))
            with isolate_rng():
                seed_all(self.seed, "prepare", round_idx)  # a resumed run makes the same data
                self.algorithm.prepare_round(round_idx, there, run)

    def asked(self, round_idx: int) -> list[Client]:
        """Return the clients that are asked to take part in a round."""
        # Present or not: the privacy accountant assumes a draw from all clients, or that each has its turn.
        cohort = cohort_in_turn if self.in_turn else uniform_cohort
        return cohort([*self.clients.values()], self.num_asked, self.seed, round_idx)


def refuse_other_epoch(epoch: int, rounds_done: int, planned: int | None) -> None:
    """Raise ValueError if trainer and loop count differently, or another round was planned."""
    if epoch != rounds_done:
        raise ValueError(
            f"the trainer has counted {epoch} epochs, but {rounds_done} rounds are done. If it goes on from a checkpoint, "
            "that is not of a federated run: give one that is. If it was stopped inside a round before, make a new "
            "trainer and give fit the newest checkpoint, ckpt_path=..."
        )
    if planned != rounds_done:
        raise ValueError(
            f"round {rounds_done + 1} is not planned: trainer.should_stop was set when the round before was over and now it "
            "is not. Take out the callback that sets it back"
        )


class NextRound(Checkpoint):
    """Callback that plans the next round once the last one is saved.

    A plan may take minutes if clients generate training data: a run that is stopped meanwhile loses nothing, and early
    stopping has decided before.
    """

    def __init__(self, plan: Callable[[L.Trainer], None]) -> None:
        self.plan = plan

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.plan(trainer)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Restore the trainer's callbacks: no run could resume from this checkpoint."""
        trainer.callbacks = others(trainer)  # type: ignore[attr-defined]


def plan_behind_checkpoints(trainer: L.Trainer, plan: Callable[[L.Trainer], None]) -> None:
    """Make the trainer call ``plan`` when a round is over and saved."""
    # Lightning calls checkpoints after all other callbacks, and this one is the last of them.
    trainer.callbacks = [*others(trainer), NextRound(plan)]  # type: ignore[attr-defined]


def others(trainer: L.Trainer) -> list[L.Callback]:
    """Return the trainer's callbacks except `NextRound`."""
    return [callback for callback in trainer.callbacks if not isinstance(callback, NextRound)]  # type: ignore[attr-defined]
