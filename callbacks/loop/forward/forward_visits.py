"""Visits of a run that are trained by forward passes alone: the settings, their checks, and the weight of such a visit."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import lightning as L
from torch import Tensor
from torch.optim import Optimizer

from fedlight.callbacks.loop.forward.forward_steps import ForwardClient, ForwardSteps
from fedlight.callbacks.loop.forward.refusals import check_module, check_optimizers
from fedlight.callbacks.loop.groups.side_by_side import SideBySide
from fedlight.callbacks.loop.visits.visit import OpenVisit
from fedlight.devices.fleet import Fleet
from fedlight.devices.memory import Train
from fedlight.federation.aggregation import Aggregation
from fedlight.federation.algorithm import Algorithm
from fedlight.federation.client import Update
from fedlight.federation.forward.zeroth_order import ZerothOrder


class ForwardVisits:
    """Forward-only visits of a run.

    Args:
        train: ``federated.train``.
        settings: ``federated.zeroth_order``; None for its defaults.
        fleet: ``federated.fleet``.
        aggregation: ``federated.aggregation``.

    Attributes:
        settings: eps, perturbations and so on.
        is_used: whether the run may have such visits.

    Raises:
        ValueError: settings that do not fit together.
    """

    def __init__(
        self,
        train: Train,
        settings: ZerothOrder | None,
        fleet: Fleet | None,
        aggregation: Aggregation | None,
    ) -> None:
        if train == "auto" and fleet is None:
            raise ValueError(
                "train=auto asks the memory of each client's device, and there are no devices: set "
                "fleet, or train=forward for all clients"
            )
        if train == "backprop" and settings is not None:
            raise ValueError(
                "zeroth_order is set, and train=backprop never uses it: set train to forward "
                "or auto, or leave zeroth_order out"
            )
        self.settings = settings or ZerothOrder()
        self.is_used = train != "backprop"
        if aggregation is not None and self.settings.forward_weight != 1:
            raise ValueError(
                f"zeroth_order.forward_weight={self.settings.forward_weight} is a factor on weights, and "
                f"{type(aggregation).__name__} has none: set it to 1, or leave aggregation out"
            )

    @property
    def perturbations(self) -> int:
        """Number of directions of a step; 0 where all visits backpropagate."""
        return self.settings.perturbations if self.is_used else 0

    def check(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Raise ValueError, before any work, for a module or trainer that needs gradients."""
        if self.is_used:
            check_module(trainer, module)

    def check_optimizers(self, optimizers: Sequence[Optimizer], parameters: Mapping[str, Tensor]) -> None:
        """Raise ValueError for optimizers that would move parameters without gradients, or hooks that would miss them."""
        if self.is_used:
            check_optimizers(optimizers, parameters)

    def enter(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        algorithm: Algorithm,
        visits: Sequence[OpenVisit],
        beside: SideBySide | None,
        purpose: tuple[int, int],
    ) -> ForwardSteps:
        """Return the steps of a group of visits, which train without gradients until `ForwardSteps.leave`.

        Args:
            trainer: with its clipping and its batches of a step.
            module: with the parameters from which the visits start.
            algorithm: whose ``adjust_gradients`` sees each step.
            visits: visits under way.
            beside: group whose clients are stacked in the module; None for one visit alone.
            purpose: seed of the run, and round.
        """
        clients = []
        for place, one in enumerate(visits):
            own = (one.parameters, one.parameters) if beside is None else beside.trained_by(place)
            clients.append(ForwardClient(one.visiting, *own))
        steps = ForwardSteps(self.settings, algorithm, clients, purpose, trainer, beside)
        steps.enter(module)
        return steps

    def weighted(self, update: Update | None, forward: bool) -> Update | None:
        """Return the update of a visit, which was ``forward``-only or not, with its weight in the average."""
        factor = self.settings.forward_weight
        if update is None or not forward or factor == 1:
            return update
        return replace(update, weight=update.weight * factor)
