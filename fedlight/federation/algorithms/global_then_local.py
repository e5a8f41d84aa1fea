"""Federated averaging, and then local rounds, where each client fine-tunes the global model alone.

The plainest personalisation: Wang et al., "Federated Evaluation of On-device Personalization", 2019,
https://arxiv.org/abs/1910.10252. It says how much of what personalised algorithms gain is had by training on locally.

In a local round nothing is sent back and the global model stays as it is. A client receives the global model in the first
local round that samples it, and goes on with its own model in the next. A client that no local round samples has the global
model for its own; ``ClientAccuracy(own_models=True)`` tests it with that, and counts such clients as
``own/without_own_model``. Enough local rounds, or a ``clients_per_round`` of all clients, leave none.
"""

from collections.abc import Sequence

from fedlight.federation.algorithm import Algorithm, Weighting
from fedlight.federation.algorithms.local_only import LocalOnly
from fedlight.federation.client import Client, State, Update, Visit, Visiting, Work
from fedlight.federation.protocols import Federation


class GlobalThenLocal(Algorithm):
    """FedAvg for some rounds, then training at each client alone.

    Early stopping may end a run before its local rounds.

    Args:
        global_rounds: rounds of FedAvg, at least 1; the rest of ``trainer.max_epochs`` are local.
        weighting: of the clients in the global rounds, as for `Algorithm`.

    Raises:
        ValueError: ``global_rounds`` is out of its range; before the first round, for a run without local rounds.
    """

    buffers = LocalOnly.buffers

    def __init__(self, global_rounds: int = 50, weighting: Weighting = "unbiased") -> None:
        super().__init__(weighting)
        if global_rounds < 1:
            raise ValueError(f"global_rounds={global_rounds} must be at least 1; with none it is LocalOnly")
        self.global_rounds = global_rounds
        self._alone = LocalOnly()
        self._is_local = False

    def check_settings(self, federation: Federation) -> None:
        if 0 <= federation.num_rounds <= self.global_rounds:
            raise ValueError(
                f"global_rounds={self.global_rounds} of the run's {federation.num_rounds} rounds leave "
                "no local round: lower it, or raise trainer.max_epochs"
            )

    def prepare_round(self, round_idx: int, cohort: Sequence[Client], federation: Federation) -> None:
        self._is_local = round_idx >= self.global_rounds

    def send(self, visit: Visit, client: Client, state: State) -> State | None:
        return self._alone.send(visit, client, state) if self._is_local else state

    def finish_visit(self, visiting: Visiting, movement: State, work: Work) -> Update | None:
        return None if self._is_local else super().finish_visit(visiting, movement, work)

    # The client: in a local round it goes on with its own model

    def start_visit(self, visit: Visit, client: Client, received: State) -> Visiting:
        if self._is_local:
            return self._alone.start_visit(visit, client, received)
        return super().start_visit(visit, client, received)

    def reply(self, visiting: Visiting, trained: State, work: Work) -> State:
        if self._is_local:
            return self._alone.reply(visiting, trained, work)
        return super().reply(visiting, trained, work)
