"""Visits of a run that are trained by forward passes alone: the settings, their checks, and the weight of such a visit.

Settings that need gradients are refused before work starts, with the remedy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import lightning as L
from torch import Tensor
from torch.optim import Optimizer

from fedlight.callbacks.loop.forward.forward_steps import ForwardClient, ForwardSteps
from fedlight.callbacks.loop.groups.refusals import ELEMENTWISE, hooks_of_users
from fedlight.callbacks.loop.parts.part import Part
from fedlight.callbacks.loop.run import Run
from fedlight.callbacks.loop.visits.visit import OpenGroup
from fedlight.devices.fleet import Fleet
from fedlight.federation.algorithm import Aggregation
from fedlight.federation.client import Update, Visit
from fedlight.federation.forward.zeroth_order import ZerothOrder

OF_GRADIENTS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step")
"""Hooks that see gradients, or the graph of a loss."""
OF_MODULES = (*OF_GRADIENTS, "backward", "configure_gradient_clipping")
BACK = "or leave forward out"


class ForwardVisits(Part):
    """Forward-only visits of a run.

    Raises:
        ValueError: settings that do not fit together.
    """

    def __init__(self, settings: ZerothOrder, fleet: Fleet | None, aggregation: Aggregation | None) -> None:
        if settings.only_where_needed and fleet is None:
            raise ValueError(
                "forward.only_where_needed=True asks the memory of each client's device, and there are no devices: set "
                "fleet, or leave only_where_needed out"
            )
        if aggregation is not None and settings.forward_weight != 1:
            raise ValueError(
                f"forward.forward_weight={settings.forward_weight} is a factor on weights, and "
                f"{type(aggregation).__name__} has none: set it to 1, or leave aggregation out"
            )
        self.settings = settings

    def check(self, run: Run) -> None:
        """Raise ValueError, before any work, for a module or trainer that needs gradients."""
        check_module(run.trainer, run.lightning_module)

    def start_round(self, run: Run) -> None:
        """Raise ValueError for optimizers that would move parameters without gradients, or hooks that would miss them."""
        check_optimizers(run.optimizers, run.parameters)

    def enter(self, run: Run, group: OpenGroup, batch: Any) -> None:
        """Make the visits of a group train without gradients until `ForwardSteps.leave`."""
        visits, beside = group.visits, group.beside
        if not run.devices.trains_forward(visits[0].visiting.visit):
            return
        clients = []
        for place, open_visit in enumerate(visits):
            trained = (
                (open_visit.parameters, open_visit.parameters) if beside is None else beside.trained_by(place)
            )
            clients.append(ForwardClient(open_visit.visiting, *trained))
        purpose = run.seed, run.round_idx
        steps = ForwardSteps(self.settings, run.algorithm, clients, purpose, run.trainer, beside)
        steps.enter(run.lightning_module)
        group.forward = steps

    def weighed(self, group: OpenGroup, visit: Visit, update: Update) -> Update:
        factor = self.settings.forward_weight
        if group.forward is None or factor == 1:
            return update
        return replace(update, weight=update.weight * factor)


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
