"""Local work of a group of visits: its optimizer steps, their learning rates, and its losses."""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fedlight.federation.client import Visit, Work

SET_BY_HAND = ("lr", "momentum", "betas", "weight_decay")
"""Settings of an optimizer's group that projects may change from step to step."""
StepSettings = tuple[dict[str, Any], ...]
"""Settings ``SET_BY_HAND`` of each group in one step: numbers, or tuples of numbers."""


class LocalWork:
    """Counters of the steps, losses and learning rates of a group of visits, which run until `leave`.

    Args:
        optimizers: the module's optimizers; none before the first visit.
        changes_gradients: name of an algorithm that has to see gradients before each step; None if it need not.
        forward: `ForwardSteps` of the group (its module imports this one); None for backpropagation.

    Attributes:
        settings: index of an optimizer -> for each of its steps so far the settings of its groups, ``SET_BY_HAND``.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        changes_gradients: str | None = None,
        forward: Any = None,
    ) -> None:
        self.forward = forward
        self._rate_scale = 1.0 if forward is None else forward.rate_scale
        self._optimizers = optimizers
        self._changes_gradients = changes_gradients
        self._announced: set[int] = set()
        self._lr = self._rate_scale * _first_rate(optimizers)
        self.settings: dict[int, list[StepSettings]] = defaultdict(list)
        self._lr_sums: dict[int, float] = defaultdict(float)
        self._steps = 0
        self._backward_since_step = False
        self._losses: list[Tensor] = []
        self._started = time.perf_counter()
        self._depth: dict[int, int] = defaultdict(int)
        self._hooks = []
        for optimizer in optimizers:
            # Torch's hooks count steps: LBFGS evaluates its closure many times in one, and 16-bit scaling leaves some out.
            _check_hooks(optimizer)
            self._hooks.append(optimizer.register_step_pre_hook(self._steps_now))
            self._hooks.append(optimizer.register_step_post_hook(self._stepped))

    def announce(self, optimizer: Optimizer) -> None:
        """Note that Lightning is about to step this optimizer; called at each evaluation of the closure."""
        # A loss scale may still leave the step out; its gradients are then discarded, not unused.
        self._backward_since_step = False
        self._announced.add(id(optimizer))

    def _steps_now(self, optimizer: Optimizer, *_: Any) -> None:
        self._depth[id(optimizer)] += 1

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        """Count an optimizer step and its learning rates."""
        self._depth[id(optimizer)] -= 1
        if self._depth[id(optimizer)]:  # a subclass's step has called its base class's step
            return
        if self._changes_gradients and id(optimizer) not in self._announced:
            raise ValueError(
                f"training_step stepped its {type(optimizer).__name__} past Lightning, so {self._changes_gradients} could "
                "not change the gradients: step what self.optimizers() gives, without use_pl_optimizer=False"
            )
        self._announced.discard(id(optimizer))
        held = [p for group in optimizer.param_groups for p in group["params"]]
        by_gradients = any(p.grad is not None for p in held)
        moved = by_gradients if self.forward is None else self.forward.step(optimizer)
        if not moved:  # training_step gave None
            return
        self._backward_since_step = False
        self._steps += 1
        # Now, since a schedule changes the rates after the step.
        self._lr = self._rate_scale * _first_rate(self._optimizers)
        rates = tuple(self._rate_scale * learning_rate(group) for group in optimizer.param_groups)
        number = next(i for i, known in enumerate(self._optimizers) if known is optimizer)
        self.settings[number].append(tuple(map(_set_by_hand, optimizer.param_groups)))
        for group, lr in zip(optimizer.param_groups, rates, strict=True):
            for parameter in group["params"]:
                self._lr_sums[id(parameter)] += lr

    def backward(self) -> None:
        """Note gradients that no optimizer step has used yet."""
        self._backward_since_step = True

    def refuse_unused_gradients(self, visit: Visit) -> None:
        """Raise ValueError for a visit that ended between a backward pass and the step that uses its gradients."""
        if self._backward_since_step:
            raise ValueError(
                f"the visit to client {visit.client_id} ended after {visit.num_batches} batches with gradients that no "
                "optimizer step has used: training_step makes one step of several batches, so set local_steps to "
                "a multiple of them; or it steps an optimizer inside of another, where the outer one has to make the step"
            )

    def add_losses(self, losses: Tensor | None) -> None:
        """Add the loss of a batch in each visit of the group, ``(visits,)``, if there is one."""
        if losses is not None:
            self._losses.append(losses)

    def leave(self, num_visits: int = 1) -> None:
        """Stop the clock, whose time the visits of the group share equally, and remove the hooks of the optimizers."""
        self._seconds = (time.perf_counter() - self._started) / num_visits
        for hook in self._hooks:
            hook.remove()
        if self.forward is not None:
            self.forward.leave()

    def done(self, place: int, parameters: Mapping[str, Tensor]) -> Work:
        """Return the work of the visit at ``place`` in the group, which trained ``parameters``."""
        losses = torch.stack([batch[place] for batch in self._losses]) if self._losses else None
        return Work(
            self._steps,
            self._lr,
            None if losses is None else losses.mean().item(),
            self._seconds,
            {name: self._lr_sums[id(p)] for name, p in parameters.items()},
            None if losses is None else losses[0].item(),  # at the start parameters
            () if self.forward is None else self.forward.gone(place),
        )


def learning_rate(group: Mapping[str, Any]) -> float:
    """Return the learning rate of an optimizer's group; 0 for an optimizer that finds its own."""
    return float(group.get("lr") or 0.0)


def _set_by_hand(group: Mapping[str, Any]) -> dict[str, Any]:
    settings = {name: group[name] for name in SET_BY_HAND if group.get(name) is not None}
    return {
        name: tuple(map(float, v)) if isinstance(v, (tuple, list)) else float(v)
        for name, v in settings.items()
    }


def _first_rate(optimizers: Sequence[Optimizer]) -> float:
    return learning_rate(optimizers[0].param_groups[0]) if optimizers else 0.0


def _check_hooks(optimizer: Optimizer) -> None:
    kind = type(optimizer)
    if not hasattr(optimizer, "_optimizer_step_post_hooks") or not getattr(kind.step, "hooked", False):
        raise ValueError(
            f"{kind.__name__} does not call torch.optim.Optimizer.__init__, so its steps cannot be counted: call "
            "super().__init__(params, defaults) in it, or take another optimizer"
        )
