"""Optimizers in a federated run: their parameters are federated, and every visit begins with fresh ones.

Federated are the parameters that the optimizers hold when the first visit of a round begins. Lightning's finetuning
callbacks add parameters when an epoch starts, and may come after the loop among the callbacks, so the loop asks when a round
opens and again before its first visit. A parameter that joins in between was not trained in this round: the module holds its
global value.

The ``state`` of optimizers is cleared, also of an optimizer in an attribute (SAM, Lookahead). Other attributes get back
their values from before the first visit.

Lightning steps a schedule of interval "step" after each optimizer step, and a module with manual optimization steps its
schedules at any time. Over a whole round that would give the first clients other rates than the last. So a visit starts
where the schedule was when the round began, and `StepSchedules` sets the start of the next round:

============  ====================================================================================================
``continue``  the next round begins where the visit that came furthest in the schedule has left it: of rounds with K steps a
              client, the schedule sees K steps a round
``restart``   the next round begins where this one began: the schedule goes through its first steps in every visit
============  ====================================================================================================

Schedules of interval "epoch", and ``ReduceLROnPlateau``, step once a round on top of either.

Under ``precision="16-mixed"`` a visit starts with the loss scale of the round's beginning, and the next round with the
smallest scale at the end of a visit.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor, equal, float32, float64
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fedlight.callbacks.loop.parts.part import Part
from fedlight.callbacks.loop.run import Run
from fedlight.callbacks.loop.visits.round import OpenRound
from fedlight.callbacks.loop.visits.visit import OpenGroup, OpenVisit, StepSettings
from fedlight.federation.algorithm import changes_gradients
from fedlight.federation.client import State, Visit


def federated_parameters(trainer: L.Trainer, module: L.LightningModule) -> dict[str, Tensor]:
    """Return the named parameters that the optimizers hold, in the order of the module.

    Raises ValueError if there are none, one is not the module's, is complex, or has too few bits.
    """
    held = _held(trainer)
    # Of a weight that the processes of a client split, the optimizers and the loop hold the part here.
    parts = {name: getattr(p, "held_here", p) for name, p in module.named_parameters()}
    named: dict[str, Tensor] = {name: p for name, p in parts.items() if id(p) in held}
    if not held:
        raise ValueError(
            "configure_optimizers gives no optimizer that holds a parameter, so there is nothing to federate: have it "
            "return one over what is to be trained, as those are the parameters that are sent"
        )
    if len(named) < len(held):
        raise ValueError(
            f"{len(held) - len(named)} of the optimizer's {len(held)} parameters are not parameters of the "
            "LightningModule: make what is trained a submodule of it"
        )
    for name, parameter in named.items():
        if parameter.is_complex():
            raise ValueError(
                f"{name} is trained in {str(parameter.dtype).removeprefix('torch.')}, and what is sent are real numbers: "
                "hold its real and imaginary parts as one real parameter, and read it with torch.view_as_complex"
            )
        if parameter.dtype not in (float32, float64):
            raise ValueError(
                f"{name} is trained in {str(parameter.dtype).removeprefix('torch.')}, which would round the global model in "
                f"every round: keep what is trained in float32. trainer.precision is {trainer.precision!r}; 'bf16-mixed' "
                "and '16-mixed' compute in 16 bits and leave parameters in float32"
            )
    return named


def refuse_renamed(
    before: Mapping[str, Tensor], now: Mapping[str, Tensor], remembered: Iterable[object]
) -> None:
    """Raise ValueError for a parameter with another name than before in a run that has ``remembered`` something by name."""
    names = {id(parameter): name for name, parameter in before.items()}
    for name, parameter in now.items():
        if (was := names.get(id(parameter), name)) != name and any(remembered):
            raise ValueError(
                f"{was} is called {name} since the last round, as pruning does, and what algorithm, server or clients "
                "remember of it is under its former name: prune before or after the run, or take FedAvg, Average and a "
                "channel that remembers nothing"
            )


def refuse_joined(trainer: L.Trainer, parameters: dict[str, Tensor], client_id: str) -> None:
    """Raise ValueError if the optimizers hold other parameters at the end of a visit than when the round began."""
    number = len(_held(trainer) ^ {id(parameter) for parameter in parameters.values()})
    if number:
        raise ValueError(
            f"{number} parameters joined or left the optimizer during the visit to client {client_id}, so some clients of "
            "the round would train them and others not: change what is trained in on_train_epoch_start, as Lightning's "
            "BaseFinetuning does"
        )


def use_fused_kernels(optimizers: Sequence[Optimizer]) -> None:
    """Make Adam and AdamW step all parameters on the CPU in one call; their Python loop takes a fifth of a small step.

    They stay as they are where a group decides ``fused`` or ``foreach``, is ``capturable`` or ``differentiable``, and where
    a parameter is not contiguous.
    """
    for optimizer in optimizers:
        groups = optimizer.param_groups
        # SGD and Adagrad also step sparse gradients, which their fused kernels refuse.
        if (
            type(optimizer) in (Adam, AdamW)
            and all(group[name] is None for group in groups for name in ("fused", "foreach"))
            and not any(group[name] for group in groups for name in ("capturable", "differentiable"))
            and all(
                p.is_cpu and p.is_floating_point() and p.is_contiguous()
                for group in groups
                for p in group["params"]
            )
        ):
            # The constructor's further flag for fused=True is not set: the kernel would divide by the loss scale itself.
            # Then gradients would reach hooks scaled, and Lightning would refuse to clip them, also in bf16-mixed.
            for options in (optimizer.defaults, *groups):
                options["fused"] = True
        if "fused" in getattr(optimizer, "defaults", ()):
            optimizer.register_step_pre_hook(MemoryOrder())


class MemoryOrder:
    """Hook on an optimizer's steps: gives gradients and states the memory order of their parameters for a fused kernel.

    The kernel for the CPU reads all numbers in the order of their memory, whatever their strides, so a gradient that has
    been transposed, or a state from before a parameter's data were replaced, would meet other numbers. A step raises
    ValueError for a parameter with gaps in its memory, such as some columns of a matrix.
    """

    def __init__(self) -> None:
        self._orders: list[tuple[int, ...]] = []

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        """Lay them out once the closure of a step, if there is one, has computed the gradients."""
        closure = settings.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            return self.lay_out(optimizer)

        def and_laid_out() -> Any:
            loss = closure()
            self.lay_out(optimizer)
            return loss

        if "closure" in settings:
            return args, {**settings, "closure": and_laid_out}
        return (args[0], and_laid_out, *args[2:]), settings

    def lay_out(self, optimizer: Optimizer) -> None:
        """Lay out dense gradients; states only where a parameter has another order than at the step before."""
        groups = (group for group in optimizer.param_groups if group.get("fused"))
        parameters = [p for group in groups for p in group["params"] if p.is_cpu]
        orders = []
        for parameter in parameters:
            orders.append(order := parameter.stride())
            gradient = parameter.grad
            if gradient is not None and not gradient.is_sparse and gradient.stride() != order:
                parameter.grad = _laid_out_as(parameter, gradient)
        for parameter in parameters if orders != self._orders else ():
            state = optimizer.state.get(parameter, {})
            for name, kept in state.items():
                if isinstance(kept, Tensor) and kept.shape == parameter.shape:
                    state[name] = _laid_out_as(parameter, kept)
        self._orders = orders


def _laid_out_as(parameter: Tensor, kept: Tensor) -> Tensor:
    if kept.stride() == parameter.stride():
        return kept
    laid_out = torch.empty_like(parameter).copy_(kept)
    if laid_out.stride() != parameter.stride():
        raise ValueError(
            f"fused=True steps a parameter of shape {tuple(parameter.shape)} and strides {parameter.stride()}, and torch's "
            "kernel would also step what lies between its numbers: make it contiguous, or leave the kernel out with "
            "fused=False"
        )
    return laid_out


def train_again(module: L.LightningModule, trained: Mapping[str, bool]) -> None:
    """Make the module train the same parameters as at a checkpoint; ``trained`` says which, by name."""
    for name, parameter in module.named_parameters():
        # On resume, finetuning callbacks leave parameters frozen that they had unfrozen before.
        parameter.requires_grad_(trained.get(name, parameter.requires_grad))


def _held(trainer: L.Trainer) -> set[int]:
    return {id(p) for each in trainer.optimizers for group in each.param_groups for p in group["params"]}


TORCHS = vars(torch.optim.SGD([torch.zeros(1)])).keys() | {"_opt_called", "_step_count", "step"}
"""Attributes that torch, its schedules and its loss scale give to every optimizer."""


class FreshOptimizers(Part):
    """Eraser of optimizers' memory; it has to see them before their first step."""

    def __init__(self) -> None:
        self._met: dict[int, _Attributes] = {}

    def enter(self, run: Run, group: OpenGroup, batch: Any) -> None:
        self.forget(run.optimizers)

    def leave(self, run: Run, group: OpenGroup, visit: OpenVisit) -> None:
        # Or moments would take memory while updates travel, and go into checkpoints.
        self.forget(run.optimizers)

    def forget(self, optimizers: Sequence[Optimizer]) -> None:
        """Clear optimizers' state, not groups and rates; raise ValueError for a changed tensor in an attribute."""
        for optimizer in _with_inner(optimizers):  # SAM and Lookahead step one that they hold
            optimizer.state.clear()
            met = self._met.get(id(optimizer))
            if met is None or met.optimizer is not optimizer:
                self._met[id(optimizer)] = _Attributes(optimizer)
            else:
                met.put_back()


class _Attributes:
    """Copy of the attributes of an optimizer that is not torch's own, made before its first step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._values: dict[str, Any] = {}
        self._tensors: dict[str, list[tuple[Tensor, int]]] = {}
        for name, value in self._own():
            tensors = [leaf for leaf in _leaves(value) if isinstance(leaf, Tensor)]
            # A tensor may be a copy of the weights, so it is compared and never put back.
            if tensors:
                self._tensors[name] = [(tensor, tensor._version) for tensor in tensors]
            else:
                self._values[name] = copy.deepcopy(value)

    def put_back(self) -> None:
        for name, value in [*self._own()]:
            if name in self._tensors:
                self._refuse_changed(name, value)
            elif name in self._values:
                setattr(self.optimizer, name, copy.deepcopy(self._values[name]))  # it may change that too
            else:
                delattr(self.optimizer, name)  # made in a visit

    def _own(self) -> Iterator[tuple[str, Any]]:
        """Yield attributes with plain values and containers of them, without those made of parameters of the groups."""
        # Torch's own optimizers keep their memory in ``state``.
        if type(self.optimizer).__module__.startswith("torch.optim"):
            return
        trained = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        plain = (Tensor, int, float, complex, str, bytes, type(None))
        for name, value in [*vars(self.optimizer).items()]:
            is_plain = all(isinstance(leaf, plain) and id(leaf) not in trained for leaf in _leaves(value))
            if is_plain and name not in TORCHS:
                yield name, value

    def _refuse_changed(self, name: str, value: Any) -> None:
        now = [(id(leaf), leaf._version) for leaf in _leaves(value) if isinstance(leaf, Tensor)]
        if now != [(id(tensor), version) for tensor, version in self._tensors[name]]:
            raise ValueError(
                f"{type(self.optimizer).__name__} changes tensors in its attribute {name}, which would pass from one client "
                "to the next: have it keep them in Optimizer.state, without which every visit begins"
            )


def _with_inner(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """Return the optimizers and those that they hold in attributes."""
    by_id: dict[int, Optimizer] = {}
    waiting = [*optimizers]
    while waiting:
        inner = waiting.pop()
        if id(inner) not in by_id:
            by_id[id(inner)] = inner
            # No walk through its state.
            attributes = [value for name, value in vars(inner).items() if name not in TORCHS]
            waiting += [leaf for leaf in _leaves(attributes) if isinstance(leaf, Optimizer)]
    return [*by_id.values()]


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the leaves of dicts, lists, tuples and sets, or the value itself."""
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, (list, tuple, set)):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


StepSchedule = Literal["continue", "restart"]
Settings = Mapping[int, Sequence[StepSettings]]
"""Index of an optimizer -> for each of its steps in a visit the settings of each group."""


@dataclass(frozen=True)
class _Position:
    """Position of an optimizer and its schedules; a further one has a larger ``order``."""

    order: tuple[float, str, str]
    options: list[dict[str, Any]]
    schedules: dict[int, dict[str, Any]]


class StepSchedules(Part):
    """Learning-rate schedules that step within a round: every visit starts them where the round began.

    Args:
        next_round: where the next round begins: where the furthest visit left them (``continue``), or where this round
            began (``restart``).

    Raises:
        ValueError: in ``start_round``, for a schedule that depends on the order of the clients.
    """

    def __init__(self, next_round: StepSchedule = "continue") -> None:
        self.next_round = next_round

    def start_round(self, run: Run) -> None:
        trainer = self._trainer = run.trainer
        self._configs = list(trainer.lr_scheduler_configs)
        self._moving = [i for i, config in enumerate(self._configs) if self._moves(config)]
        for i in self._moving:
            self._check(i, run.planned.begins)
        self._start = [self._position(optimizer) for optimizer in trainer.optimizers]
        self._furthest = [*self._start]
        self._last: list[_Position] = []
        self._settings: dict[int, tuple[str, Sequence[StepSettings]]] = {}

    def enter(self, run: Run, group: OpenGroup, batch: Any) -> None:
        for optimizer, position in zip(self._trainer.optimizers, self._start, strict=True):
            self._put(optimizer, position)

    def leave(self, run: Run, group: OpenGroup, visit: OpenVisit) -> None:
        """Save the positions after the last batch of a visit, with its steps' settings (learning rates, weight decay, ...).

        Raises ValueError for a step with other settings than the same step of an earlier visit of the round.
        """
        self._finish(visit.visiting.visit, {} if scaler_of(run.trainer) else group.work.settings)

    def _finish(self, visit: Visit, settings: Settings) -> None:
        """Save the positions after a visit; where a loss scale leaves steps out, the others have unlike rates."""
        self._compare(visit, settings)
        self._last = [self._position(optimizer, visit) for optimizer in self._trainer.optimizers]
        pairs = zip(self._furthest, self._last, strict=True)
        self._furthest = [max(before, now, key=lambda position: position.order) for before, now in pairs]

    def end_visits(self, run: Run, round: OpenRound) -> None:
        """Set schedules for the next round; Lightning has stepped those of interval "epoch" already."""
        for number, optimizer in enumerate(self._trainer.optimizers):
            start, target = self._start[number], self._furthest[number]
            if self._of(optimizer, self._moving):
                if self.next_round == "restart":
                    target = start
            elif _same(target.options, start.options):  # no visit has changed it
                continue
            if not self._last or target is not self._last[number]:
                self._put(optimizer, target)
                self._step_by_epoch(optimizer, start, run.lightning_module)

    def partial(self) -> dict[str, Any]:
        """Return where this process is after `end_visits`, how far its furthest visits came, and its visits' settings."""
        ends = []
        for number, optimizer in enumerate(self._trainer.optimizers):
            end, now = self._furthest[number], self._position(optimizer)
            moved = self._of(optimizer, self._moving) or not _same(end.options, self._start[number].options)
            ends.append((end.order, (now.options, now.schedules) if moved else None))
        return {"ends": ends, "settings": self._settings}

    def merge(self, partials: Sequence[Mapping[str, Any]]) -> None:
        """Go where the furthest visit of all processes has come; ValueError if their steps had other settings."""
        for partial in partials:
            for number, (client, settings) in partial["settings"].items():
                self._compare(Visit(client, len(settings)), {number: settings})
        for number, optimizer in enumerate(self._trainer.optimizers):
            order, at = max((partial["ends"][number] for partial in partials), key=lambda end: end[0])
            if at is not None:
                self._put(optimizer, _Position(order, *at), [*at[1]])

    def _moves(self, config: Any) -> bool:
        """Return whether a schedule may step within a round; under manual optimization any may."""
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
                f"frequency to 1, or local_steps to a multiple of {every}"
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
            # Among equal numbers of steps no order of the visits decides.
            order = (float(sum(steps)), visit.client_id, visit.split)
        # All options: some schedules also change momenta.
        options = [{k: _copy(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        if visit is None:  # the others step after the round, and may have to do so twice
            others = self._of(optimizer, range(len(self._configs)))
            schedules |= {i: deepcopy(self._configs[i].scheduler.state_dict()) for i in others}
        return _Position(order, options, schedules)

    def _put(self, optimizer: Optimizer, position: _Position, numbers: Sequence[int] | None = None) -> None:
        """Put an optimizer and its moving schedules, or those of ``numbers``, at a position."""
        for group, options in zip(optimizer.param_groups, position.options, strict=True):
            for key, value in options.items():
                if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = _copy(value)
        for i in self._of(optimizer, self._moving) if numbers is None else numbers:
            self._configs[i].scheduler.load_state_dict(deepcopy(position.schedules[i]))

    def _step_by_epoch(self, optimizer: Optimizer, start: _Position, module: L.LightningModule) -> None:
        """Repeat the steps of schedules of interval "epoch" on top of the schedules' positions after the round."""
        for i in self._of(optimizer, range(len(self._configs))):
            config = self._configs[i]
            due = (self._trainer.current_epoch + 1) % config.frequency == 0
            if i not in self._moving and not config.reduce_on_plateau and due:
                config.scheduler.load_state_dict(deepcopy(start.schedules[i]))
                module.lr_scheduler_step(config.scheduler, None)

    def _compare(self, visit: Visit, settings: Settings) -> None:
        for number, of_client in settings.items():
            optimizer = self._trainer.optimizers[number]
            schedules = [self._configs[i].scheduler for i in self._of(optimizer, self._moving)]
            if any(isinstance(schedule, ReduceLROnPlateau) for schedule in schedules):
                continue  # the module steps it by the client's own value
            client, before = self._settings.get(number, (visit.client_id, of_client))
            for step, (a, b) in enumerate(zip(before, of_client, strict=False)):
                if a != b:
                    name, theirs, here = _first_difference(a, b)
                    raise ValueError(
                        f"step {step + 1} of the visit to client {visit.client_id} had {name}={here}, and that to client "
                        f"{client} {name}={theirs}: something sets it by trainer.global_step or batch_idx, which run on "
                        "through the clients of a round. Take a schedule with interval 'step', which every visit starts at "
                        "the same place, or count the steps of a visit from on_visit_start on"
                    )
            if len(of_client) >= len(before):
                self._settings[number] = visit.client_id, of_client


def _first_difference(some: StepSettings, others: StepSettings) -> tuple[str, Any, Any]:
    """Return the first setting that differs between two steps, and both values; an added group differs as a whole."""
    for a, b in zip(some, others, strict=False):
        for name in (name for name in {**a, **b} if a.get(name) != b.get(name)):
            return name, a.get(name), b.get(name)
    return "number of groups", len(some), len(others)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else deepcopy(value)


def _same(some: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> bool:
    def alike(a: Any, b: Any) -> bool:
        return equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)

    return all(
        a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
        for a, b in zip(some, others, strict=True)
    )


def scaler_of(trainer: L.Trainer) -> Any:
    """Return the loss scale of 16-bit training; None where the trainer's precision has none."""
    return getattr(trainer.precision_plugin, "scaler", None)


class LossScale(Part):
    """Loss scale of 16-bit training, restored for each visit."""

    def start_round(self, run: Run) -> None:
        """Raise ValueError if the algorithm would add to gradients that are still scaled."""
        self._plugin: Any = run.trainer.precision_plugin
        fused = [each for each in run.optimizers if getattr(each, "_step_supports_amp_scaling", False)]
        if fused and (name := changes_gradients(run.algorithm)):
            raise ValueError(
                f"{type(fused[0]).__name__} with fused=True divides gradients by the loss scale itself, after "
                f"{name} has added to them: leave fused out, or set trainer.precision='bf16-mixed'"
            )
        self._start = self._plugin.state_dict()
        self._ends: list[dict[str, Any]] = []

    def enter(self, run: Run, group: OpenGroup, batch: Any) -> None:
        # Else a client would inherit the scale that an overflow of the one before has halved.
        self._plugin.load_state_dict(dict(self._start))

    def leave(self, run: Run, group: OpenGroup, visit: OpenVisit) -> None:
        self._ends.append(self._plugin.state_dict())

    def partial(self) -> list[dict[str, Any]]:
        ends, self._ends = self._ends, []
        return ends

    def merge(self, partials: Sequence[Sequence[dict[str, Any]]]) -> None:
        self._ends = [end for partial in partials for end in partial]

    def finish_round(self, run: Run, round: OpenRound, movement: State) -> dict[str, float]:
        if self._ends:
            smallest = min(self._ends, key=lambda end: (end["scale"], end["_growth_tracker"]))
            self._plugin.load_state_dict(dict(smallest))
        return {}
