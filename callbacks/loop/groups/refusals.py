"""Refusals of runs that cannot train several clients in one batch, before work starts, with the remedy."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.optim import Optimizer

from fedlight.callbacks.loop.parts.buffers import BufferPolicy
from fedlight.callbacks.loop.run import LossPerExample
from fedlight.callbacks.loop.visits.visit import TakesVisitStart
from fedlight.federation.protocols import StreamsGroups
from fedlight.stacking.stacked_adapters import with_adapter

_ELEMENTWISE = "SGD Adam AdamW NAdam RAdam Adamax Adagrad Adadelta RMSprop Rprop ASGD"
ELEMENTWISE = frozenset(getattr(torch.optim, name) for name in _ELEMENTWISE.split())
"""Optimizers that step each number by its own gradients alone, so that they step stacked clients as each client alone."""
IN_VISITS = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
)
"""Hooks that see the module, its batch or its gradients during a visit."""
OF_DATA = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""Hooks that see a batch on its way to the module, and return it."""
OF_MODULES = (
    *IN_VISITS,
    *OF_DATA,
    "backward",
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
)
OURS = ("lightning.", "fedlight.")


def refusal(reason: str, remedy: str = "") -> ValueError:
    """Return the error for a run that cannot train several clients at once, with a remedy besides one at a time."""
    or_else = f"{remedy}, or set it to 1" if remedy else "set it to 1"
    return ValueError(f"clients_at_once above 1: {reason}: {or_else}")


def check_run(trainer: L.Trainer, module: L.LightningModule, data: object, buffers: BufferPolicy) -> None:
    """Raise ValueError for a module, data or settings of a trainer that train one client at a time alone."""
    if not isinstance(data, StreamsGroups):
        raise refusal(
            f"{type(data).__name__} does not give batches of several clients",
            "derive it from FederatedDataModule or wrap it, FederatedWrapper(datamodule, clients=...)",
        )
    name = type(module).__name__
    if not isinstance(module, LossPerExample):
        raise refusal(
            f"{name} has no example_losses(batch) -> (examples,), of which each client's loss is the mean",
            "add this method, and return its mean in training_step",
        )
    if not module.automatic_optimization:
        raise refusal(f"{name} has automatic_optimization=False and steps batches of several clients as one")
    if trainer.precision == "16-mixed":
        raise refusal(
            "trainer.precision='16-mixed' scales one loss for all clients and leaves out a step of all where one overflows",
            "use 'bf16-mixed' or '32-true'",
        )
    if type(buffers) is not BufferPolicy:
        raise refusal(
            f"{type(buffers).__name__} gives each client buffers of its own, and a batch has one set",
            "leave it out of parts",
        )
    _refuse_hooks(module, OF_MODULES)
    if trainer.datamodule is not None:  # type: ignore[attr-defined]
        _refuse_hooks(trainer.datamodule, OF_DATA)  # type: ignore[attr-defined]
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        _refuse_hooks(callback, IN_VISITS)


def _refuse_hooks(owner: Any, hooks: Sequence[str]) -> None:
    """Raise ValueError for a module or callback that sees a visit from inside and does not say that it takes several."""
    if getattr(owner, "takes_stacked", False):
        return
    if isinstance(owner, TakesVisitStart):
        hooks = ("on_visit_start", *hooks)
    for hook in hooks_of_users(owner, hooks):
        raise refusal(
            f"{type(owner).__name__}.{hook} would see a batch of several clients, and parameters and gradients with a "
            "leading dimension of clients",
            "give the class takes_stacked = True if it can work with these, take it out",
        )


def hooks_of_users(owner: Any, hooks: Sequence[str]) -> Iterator[str]:
    """Yield those hooks of a module or callback that neither Lightning nor fedlight defines."""
    for hook in hooks:
        method = vars(owner).get(hook) or getattr(type(owner), hook, None)  # an object may have its own
        if method is not None and not (getattr(method, "__module__", None) or "").startswith(OURS):
            yield hook


def check_optimizers(optimizers: Sequence[Optimizer], parameters: Mapping[str, Tensor]) -> None:
    """Raise ValueError for optimizers that do not step elementwise, or treat the module's adapters differently."""
    groups: dict[int, int] = {}
    for name, held in parameters.items():
        if held._backward_hooks or getattr(held, "_post_accumulate_grad_hooks", None):
            raise refusal(
                f"a hook on {name} would see the gradients of several clients, with a leading dimension of clients",
                "take the hook out",
            )
    for optimizer in optimizers:
        hooks = [
            *optimizer._optimizer_step_pre_hooks.values(),
            *optimizer._optimizer_step_post_hooks.values(),
        ]
        if not all((getattr(hook, "__module__", None) or "").startswith(OURS) for hook in hooks):
            raise refusal(
                f"a hook on the steps of {type(optimizer).__name__} would see parameters and gradients of several clients, "
                "with a leading dimension of clients",
                "take the hook out",
            )
        if type(optimizer) not in ELEMENTWISE:
            raise refusal(
                f"{type(optimizer).__name__} is not known to step each number by its own gradients alone",
                f"take one of {', '.join(sorted(kind.__name__ for kind in ELEMENTWISE))}",
            )
        groups |= {id(p): id(group) for group in optimizer.param_groups for p in group["params"]}
    # Clients that train several adapters side by side share the parameters of one of them.
    seen: dict[str, tuple[str, int]] = {}
    for name, parameter in parameters.items():
        first, group = seen.setdefault(with_adapter(name, ""), (name, groups[id(parameter)]))
        if group != groups[id(parameter)]:
            raise refusal(
                f"{name} and {first} are in different groups of the optimizers, and clients that train these adapters side "
                "by side share one",
                "give all adapters one group",
            )
