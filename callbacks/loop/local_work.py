"""What is done in a visit while it is under way: steps, losses, learning rates, time.

Steps are counted at torch's optimizers: there a step is one step, however often it evaluates its closure (LBFGS does so many
times), and none is counted that 16-bit scaling leaves out.
"""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fedlight.federation.client import Visit, Work

SET_BY_HAND = ("lr", "momentum", "betas", "weight_decay")
"""Settings of an optimizer's group that projects change from step to step."""
StepSettings = tuple[dict[str, Any], ...]
"""These of each group in one step; numbers, or tuples of them."""


class LocalWork:
    """The work of the visit under way, watched until :meth:`done` or :meth:`leave`.

    Args:
        optimizers: of the module; none before the first visit.
        changes_gradients: the name of an algorithm that has to see gradients before each step; None if it need not.

    Attributes:
        settings: number of an optimizer -> for each of its steps so far the settings of its groups, ``SET_BY_HAND``.
    """

    def __init__(self, optimizers: Sequence[Optimizer], changes_gradients: str | None = None) -> None:
        self._optimizers = optimizers
        self._changes_gradients = changes_gradients
        self._announced: set[int] = set()
        self._lr = _first_rate(optimizers)
        self.settings: dict[int, list[StepSettings]] = defaultdict(list)
        self._lr_sums: dict[int, float] = defaultdict(float)
        self._steps = 0
        self._backward_since_step = False
        self._losses: list[Tensor] = []
        self._started = time.perf_counter()
        self._depth: dict[int, int] = defaultdict(int)
        self._hooks = []
        for optimizer in optimizers:
            _check_hooks(optimizer)
            self._hooks.append(optimizer.register_step_pre_hook(self._steps_now))
            self._hooks.append(optimizer.register_step_post_hook(self._stepped))

    def announce(self, optimizer: Optimizer) -> None:
        """Lightning says that this optimizer will step; it says so at each evaluation of the closure.

        A loss scale may leave the step out even so: then its gradients were of no use, and nobody waits for them.
        """
        self._backward_since_step = False
        self._announced.add(id(optimizer))

    def _steps_now(self, optimizer: Optimizer, *_: Any) -> None:
        self._depth[id(optimizer)] += 1

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        """Counts an optimizer step and its learning rates; a scheduler changes them afterwards."""
        self._depth[id(optimizer)] -= 1
        if self._depth[id(optimizer)]:  # a subclass's step has called that of its class
            return
        if self._changes_gradients and id(optimizer) not in self._announced:
            raise ValueError(
                f"training_step stepped its {type(optimizer).__name__} past Lightning, so {self._changes_gradients} could "
                "not change the gradients: step what self.optimizers() gives, without use_pl_optimizer=False"
            )
        self._announced.discard(id(optimizer))
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if all(p.grad is None for p in held):  # training_step gave None: nothing has moved
            return
        self._backward_since_step = False
        self._steps += 1
        self._lr = _first_rate(self._optimizers)
        rates = tuple(learning_rate(group) for group in optimizer.param_groups)
        number = next(i for i, one in enumerate(self._optimizers) if one is optimizer)
        self.settings[number].append(tuple(map(_set_by_hand, optimizer.param_groups)))
        for group, lr in zip(optimizer.param_groups, rates, strict=True):
            for parameter in group["params"]:
                self._lr_sums[id(parameter)] += lr

    def backward(self) -> None:
        """Notes gradients that no optimizer step has used yet."""
        self._backward_since_step = True

    def refuse_unused_gradients(self, visit: Visit) -> None:
        """Raises ``ValueError`` where the visit ended between a backward pass and the step that was to use it."""
        if self._backward_since_step:
            raise ValueError(
                f"the visit to client {visit.client_id} ended after {visit.num_batches} batches with gradients that no "
                "optimizer step has used: training_step makes one step of several batches, so set federated.local_steps to "
                "a multiple of them; or it steps an optimizer inside of another, where the outer one has to make the step"
            )

    def add_loss(self, loss: Tensor | None) -> None:
        """Takes the loss of a batch, where there is one."""
        if loss is not None:
            self._losses.append(loss)

    def leave(self) -> None:
        """Stops watching the optimizers."""
        for hook in self._hooks:
            hook.remove()

    def done(self, parameters: Mapping[str, Tensor]) -> Work:
        """All of it, at the end of the visit to a client that trained ``parameters``."""
        self.leave()
        mean_loss = torch.stack(self._losses).mean().item() if self._losses else None
        lr_sums = {name: self._lr_sums[id(p)] for name, p in parameters.items()}
        return Work(self._steps, self._lr, mean_loss, time.perf_counter() - self._started, lr_sums)


def learning_rate(group: Mapping[str, Any]) -> float:
    """Of an optimizer's group; 0 where it has none, as an optimizer that finds its own."""
    return float(group.get("lr") or 0.0)


def _set_by_hand(group: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: group[name] for name in SET_BY_HAND if group.get(name) is not None}
    return {
        name: tuple(map(float, v)) if isinstance(v, (tuple, list)) else float(v) for name, v in found.items()
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
