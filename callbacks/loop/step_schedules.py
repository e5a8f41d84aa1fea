"""Learning-rate schedules that step within a round: every client of a round goes through the same piece of the schedule.

Lightning steps a schedule of interval "step" after each optimizer step, and a module with manual optimization steps its
schedules when it likes. Through a whole round that would give the first clients other rates than the last. So a visit starts
where the schedule stood when the round began, and what follows depends on ``step_schedule``:

============  ====================================================================================================
``continue``  the next round begins where the visit that came furthest in the schedule has left it: of rounds with K steps a
              client, the schedule sees K steps a round
``restart``   the next round begins where this one began: the schedule goes through its first steps in every visit
============  ====================================================================================================

Schedules of interval "epoch", and ``ReduceLROnPlateau``, step once a round, as always, on top of either. Snapshots hold the
state of schedules and all options of the optimizers' groups, as some schedules change momenta, too.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

import lightning as L
from torch import Tensor, equal
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fedlight.callbacks.loop.local_work import StepSettings
from fedlight.federation.client import Visit

StepSchedule = Literal["continue", "restart"]
Settings = Mapping[int, Sequence[StepSettings]]
"""Of a visit: number of an optimizer -> for each of its steps the settings of each group."""


@dataclass(frozen=True)
class _Position:
    """Where an optimizer and its schedules stand; a further one has a larger ``order``."""

    order: tuple[float, str, str]
    options: list[dict[str, Any]]
    schedules: dict[int, dict[str, Any]]


class StepSchedules:
    """Puts schedules where a visit or a round has to find them.

    Args:
        after_round: ``continue`` or ``restart``, see above.

    Raises:
        ValueError: another value; in ``start_round``, for a schedule that depends on the order of the clients.
    """

    def __init__(self, after_round: StepSchedule = "continue") -> None:
        if after_round not in ("continue", "restart"):
            raise ValueError(f"federated.step_schedule={after_round!r} is not one of continue, restart")
        self.after_round = after_round

    def start_round(self, trainer: L.Trainer, begins: Sequence[int]) -> None:
        """Before the first batch of a round.

        Args:
            trainer: whose optimizers and schedules they are.
            begins: numbers of the batches with which visits begin.
        """
        self._trainer = trainer
        self._configs = list(trainer.lr_scheduler_configs)
        self._moving = [i for i, config in enumerate(self._configs) if self._moves(config)]
        for i in self._moving:
            self._check(i, begins)
        self._start = [self._position(optimizer) for optimizer in trainer.optimizers]
        self._furthest = [*self._start]
        self._last: list[_Position] = []
        self._settings: dict[int, tuple[str, Sequence[StepSettings]]] = {}

    def start_visit(self) -> None:
        """Before the first batch of a visit."""
        for optimizer, position in zip(self._trainer.optimizers, self._start, strict=True):
            self._put(optimizer, position)

    def finish_visit(self, visit: Visit, settings: Settings) -> None:
        """After the last batch of a visit.

        Args:
            visit: that is over.
            settings: learning rates, weight decay and the like of its steps.

        Raises:
            ValueError: a step had other settings than the same step of an earlier visit of the round.
        """
        self._compare(visit, settings)
        self._last = [self._position(optimizer, visit) for optimizer in self._trainer.optimizers]
        pairs = zip(self._furthest, self._last, strict=True)
        self._furthest = [max(before, now, key=lambda position: position.order) for before, now in pairs]

    def finish_round(self, module: L.LightningModule) -> None:
        """After the last batch of a round, of which Lightning has stepped the schedules of interval "epoch" already."""
        for number, optimizer in enumerate(self._trainer.optimizers):
            start, target = self._start[number], self._furthest[number]
            if self._of(optimizer, self._moving):
                if self.after_round == "restart":
                    target = start
            elif _same(target.options, start.options):
                continue
            if not self._last or target is not self._last[number]:
                self._put(optimizer, target)
                self._step_by_epoch(optimizer, start, module)

    def _moves(self, config: Any) -> bool:
        """Whether it may step within a round; of manual optimization nobody can tell beforehand."""
        return config.interval == "step" or not self._trainer.lightning_module.automatic_optimization

    def _check(self, index: int, begins: Sequence[int]) -> None:
        config = self._configs[index]
        name, every = type(config.scheduler).__name__, config.frequency
        if not self._trainer.lightning_module.automatic_optimization:
            return
        if config.reduce_on_plateau:
            raise ValueError(
                f"{name} with interval 'step' would compare one client's values with another's: set interval 'epoch', which "
                "is a round"
            )
        if any(begin % every for begin in begins):
            raise ValueError(
                f"{name} steps every {every} batches of the round, and a visit does not begin at one of them: set its "
                f"frequency to 1, or federated.local_steps to a multiple of {every}"
            )

    def _of(self, optimizer: Optimizer, numbers: Sequence[int]) -> list[int]:
        return [i for i in numbers if self._configs[i].scheduler.optimizer is optimizer]

    def _position(self, optimizer: Optimizer, visit: Visit | None = None) -> _Position:
        numbers = self._of(optimizer, self._moving)
        schedules = {i: deepcopy(self._configs[i].scheduler.state_dict()) for i in numbers}
        order = (-1.0, "", "")
        if visit is not None:
            steps = [getattr(self._configs[i].scheduler, "last_epoch", visit.num_batches) for i in numbers]
            steps = steps or [visit.num_batches]
            order = (float(sum(steps)), visit.client_id, visit.split)
        options = [{k: _copy(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        if visit is None:  # the others step when the round is over, and may have to do so once more
            others = self._of(optimizer, range(len(self._configs)))
            schedules |= {i: deepcopy(self._configs[i].scheduler.state_dict()) for i in others}
        return _Position(order, options, schedules)

    def _put(self, optimizer: Optimizer, position: _Position) -> None:
        for group, options in zip(optimizer.param_groups, position.options, strict=True):
            for key, value in options.items():
                if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = _copy(value)
        for i in self._of(optimizer, self._moving):
            self._configs[i].scheduler.load_state_dict(deepcopy(position.schedules[i]))

    def _step_by_epoch(self, optimizer: Optimizer, start: _Position, module: L.LightningModule) -> None:
        """Once more what Lightning has done, now on top of where the schedules stand after the round."""
        for i in self._of(optimizer, range(len(self._configs))):
            config = self._configs[i]
            due = (self._trainer.current_epoch + 1) % config.frequency == 0
            if i not in self._moving and not config.reduce_on_plateau and due:
                config.scheduler.load_state_dict(deepcopy(start.schedules[i]))
                module.lr_scheduler_step(config.scheduler, None)

    def _compare(self, visit: Visit, settings: Settings) -> None:
        for number, own in settings.items():
            optimizer = self._trainer.optimizers[number]
            schedules = [self._configs[i].scheduler for i in self._of(optimizer, self._moving)]
            if any(isinstance(schedule, ReduceLROnPlateau) for schedule in schedules):
                continue  # what the module has it step by is the client's own
            client, before = self._settings.get(number, (visit.client_id, own))
            for step, (a, b) in enumerate(zip(before, own, strict=False)):
                if a != b:
                    name, theirs, here = _first_difference(a, b)
                    raise ValueError(
                        f"step {step + 1} of the visit to client {visit.client_id} had {name}={here}, and that to client "
                        f"{client} {name}={theirs}: something sets it by trainer.global_step or batch_idx, which run on "
                        "through the clients of a round. Take a schedule with interval 'step', which every visit starts at "
                        "the same place, or count the steps of a visit from on_visit_start on"
                    )
            if len(own) >= len(before):
                self._settings[number] = visit.client_id, own


def _first_difference(some: StepSettings, others: StepSettings) -> tuple[str, Any, Any]:
    """Name of the first setting in which two steps differ, and its two values; groups that joined differ as a whole."""
    for a, b in zip(some, others, strict=False):
        for name in (name for name in {**a, **b} if a.get(name) != b.get(name)):
            return name, a.get(name), b.get(name)
    return "number of groups", len(some), len(others)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else deepcopy(value)


def _same(some: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all groups have the same options."""

    def alike(a: Any, b: Any) -> bool:
        return equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)

    return all(
        a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
        for a, b in zip(some, others, strict=True)
    )
