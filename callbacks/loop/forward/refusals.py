"""Refusals of settings that need gradients in a run with forward-only visits, before work starts, with the remedy."""

from collections.abc import Mapping, Sequence

import lightning as L
from torch import Tensor
from torch.optim import Optimizer

from fedlight.callbacks.loop.groups.refusals import ELEMENTWISE, hooks_of_users

OF_GRADIENTS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step")
"""Hooks that see gradients, or the graph of a loss."""
OF_MODULES = (*OF_GRADIENTS, "backward", "configure_gradient_clipping")
BACK = "or leave forward out"


def check_module(trainer: L.Trainer, module: L.LightningModule) -> None:
    """Raise ValueError for a module, a callback or a precision that needs a backward pass."""
    name = type(module).__name__
    if not module.automatic_optimization:
        raise ValueError(
            f"forward: {name} has automatic_optimization=False, so its training_step takes gradients and steps "
            f"optimizers by itself: have it return the loss and leave the steps to Lightning, {BACK}"
        )
    if trainer.precision == "16-mixed":
        raise ValueError(
            "forward: trainer.precision='16-mixed' scales a loss for its gradients, and forward-only visits have "
            f"none: use 'bf16-mixed' or '32-true', {BACK}"
        )
    if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
        raise ValueError(
            "forward: trainer.gradient_clip_algorithm=value clips the gradients of parameters, and forward-only visits "
            f"have none: set it to norm, {BACK}"
        )
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    for owner, hooks in ((module, OF_MODULES), *((callback, OF_GRADIENTS) for callback in callbacks)):
        for hook in () if getattr(owner, "takes_forward", False) else hooks_of_users(owner, hooks):
            raise ValueError(
                f"forward: {type(owner).__name__}.{hook} would see no gradients in a forward-only visit: give "
                f"the class takes_forward = True if it can work without them, take the hook out, {BACK}"
            )


def check_optimizers(optimizers: Sequence[Optimizer], parameters: Mapping[str, Tensor]) -> None:
    """Raise ValueError for optimizers that move parameters without a gradient, or maximize, and for hooks on gradients."""
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if type(optimizer) not in ELEMENTWISE:
            raise ValueError(
                f"forward: {name} is not known to leave parameters without gradients where they are, and "
                "forward-only visits take its learning rate alone: take one of "
                f"{', '.join(sorted(kind.__name__ for kind in ELEMENTWISE))}, {BACK}"
            )
        if any(group.get("maximize") for group in optimizer.param_groups):
            raise ValueError(
                f"forward: {name} has maximize=True, and forward-only visits go down: return the negative loss "
                f"and leave maximize out, {BACK}"
            )
    for name, held in parameters.items():
        if held._backward_hooks or getattr(held, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"forward: a hook on the gradient of {name} would never be called: take the hook out, {BACK}"
            )
