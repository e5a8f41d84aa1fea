"""Synchronous rounds: a cohort is asked, all of it starts from the newest model, and the server waits for it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import lightning as L
from torch import Tensor

from fedlight.callbacks.loop import guard
from fedlight.callbacks.loop.run import NoDevices
from fedlight.federation.algorithm import Algorithm
from fedlight.federation.client import Client, Update, Visit
from fedlight.federation.state import State

VisitsOf = Callable[[int, Sequence[Client]], list[Visit]]
"""Function from a round and clients that are asked in it to their visits."""
ProductErrorSetting = bool | Literal["auto"]


class Synchronous:
    """Mode ``sync``, and null object for what only buffered rounds have.

    Args:
        clients_per_round: clients sampled in a round.
    """

    def __init__(self, clients_per_round: int) -> None:
        self.clients_per_round = clients_per_round

    def check(self, trainer: L.Trainer, algorithm: Algorithm, buffers: str, is_private: bool) -> None:
        """Raise ValueError, before any work, for a run that does not work in this mode."""

    def meet(self, clients: Mapping[str, Client]) -> None:
        """Take all clients by id; raise ValueError if there are too few."""
        guard.check_cohort(len(clients), clients_per_round=self.clients_per_round)

    def plan(
        self,
        round_idx: int,
        now_seconds: float,
        cohort: Sequence[Client],
        visits_of: VisitsOf,
        devices: NoDevices,
        parameters: Mapping[str, Tensor],
    ) -> list[Visit]:
        """Return the visits of a round that starts at ``now_seconds`` (virtual time), in training order.

        Args:
            round_idx: the round.
            now_seconds: virtual time.
            cohort: clients that a synchronous round asks.
            visits_of: function from a round and clients to the visits that the algorithm plans.
            devices: the clients' devices.
            parameters: federated parameters, of which names and shapes count.
        """
        return devices.admit(round_idx, now_seconds, visits_of(round_idx, cohort), parameters)

    def model_for(self, visit: Visit, newest: State) -> State:
        """Return the global parameters that the client of a visit has received."""
        return newest

    def weighed(self, update: Update, visit: Visit, round_idx: int) -> Update:
        """Return a visit's update as it is aggregated in a round."""
        return update

    def product_error(self, setting: ProductErrorSetting) -> ProductErrorSetting:
        """Return the setting of ``fed/product_error`` in this mode; raise ValueError where it has no meaning."""
        return setting

    def finish_round(self, model: State) -> dict[str, float]:
        """Take the global parameters with which the round began, and return metrics of the round that is over."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: tensors and plain values, which stay as they are until a round is over."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned."""
