"""Visits of a run that are trained by forward passes alone: the settings, their checks, and the weight of such a visit."""

from dataclasses import replace
from typing import Any

from fedlight.callbacks.loop.forward.forward_steps import ForwardClient, ForwardSteps
from fedlight.callbacks.loop.forward.refusals import check_module, check_optimizers
from fedlight.callbacks.loop.parts.part import Part
from fedlight.callbacks.loop.run import Run
from fedlight.callbacks.loop.visits.visit import OpenGroup
from fedlight.devices.fleet import Fleet
from fedlight.federation.algorithm import Aggregation
from fedlight.federation.client import Update, Visit
from fedlight.federation.forward.zeroth_order import ZerothOrder


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
