"""Who is asked in a round, which visits that gives, and where in the round's stream of batches they are."""

from collections.abc import Callable, Mapping

from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from fedlight.callbacks.loop.federated_run import Run, seed_all
from fedlight.callbacks.loop.round_schedule import RoundSchedule, number_asked, visit_lengths
from fedlight.federation.algorithm import Algorithm
from fedlight.federation.client import Client, Visit, uniform_cohort
from fedlight.federation.protocols import FederatedData


class RoundPlanner:
    """Plans one round after the other, for the datamodule to stream its batches.

    Args:
        algorithm: whose visits they are.
        data: of the clients; it is told the visits.
        clients: all clients by id.
        clients_per_round: clients whose work is wanted.
        over_selection: so many times as many are asked.
        local_steps: optimizer steps of a visit; None for one pass over the data.
        accumulation: batches of an optimizer step in a round, by its number.
        seed: of the sampling, and of what the algorithm draws when it prepares a round.

    Attributes:
        num_asked: clients that are asked in a round.
        cohort: those who take part in the round that was planned last.
        schedule: of its visits.
        planned: that round; None before the first.
    """

    cohort: list[Client]
    schedule: RoundSchedule

    def __init__(
        self,
        algorithm: Algorithm,
        data: FederatedData,
        clients: Mapping[str, Client],
        clients_per_round: int,
        over_selection: float,
        local_steps: int | None,
        accumulation: Callable[[int], int],
        seed: int,
    ) -> None:
        self.algorithm = algorithm
        self.data = data
        self.clients = clients
        self.num_asked = min(len(clients), number_asked(clients_per_round, over_selection))
        self.local_steps = local_steps
        self.accumulation = accumulation
        self.seed = seed
        self.planned: int | None = None

    def outline(self, round_idx: int, accumulation: int) -> None:
        """Tells the data of one visit, as long as the longest of all clients.

        Lightning may ask for a loader before the first round is planned, to work out ``trainer.estimated_stepping_batches``.
        That is then how many steps a schedule makes that goes on from round to round, or a few more where visits differ in
        length.

        Args:
            round_idx: of the round that will be planned first.
            accumulation: batches of an optimizer step.
        """
        num_batches = visit_lengths(self.local_steps, accumulation, self.data.num_batches)
        visits = self.algorithm.plan(round_idx, [*self.clients.values()], num_batches)
        nobody = Visit(next(iter(self.clients)), accumulation)
        self.data.set_visits([max(visits, key=lambda visit: visit.num_batches, default=nobody)], round_idx)

    def plan(
        self,
        round_idx: int,
        run: Run,
        parameters: Mapping[str, Tensor],
        now_seconds: float,
    ) -> None:
        """Plans the visits of a round and tells the data.

        Args:
            round_idx: the round.
            run: whose module holds the global state.
            parameters: that are federated.
            now_seconds: virtual time at which the round starts.
        """
        if self.planned != round_idx:
            self._prepare(round_idx, now_seconds, run)
            self.planned = round_idx
        accumulation = self.accumulation(round_idx)
        num_batches = visit_lengths(self.local_steps, accumulation, self.data.num_batches)
        visits = self.algorithm.plan(round_idx, self._asked(round_idx), num_batches)
        visits = run.devices.admit(round_idx, now_seconds, visits, parameters)
        self.cohort = [self.clients[name] for name in sorted({visit.client_id for visit in visits})]
        self.schedule = RoundSchedule(visits, accumulation)
        # Lightning ends a run at an epoch without batches.
        first = next(iter(self.clients))
        self.data.set_visits(visits or [Visit(first, accumulation)], round_idx)

    def _prepare(self, round_idx: int, now_seconds: float, run: Run) -> None:
        """Has the algorithm prepare the round, for those who are there; every random stream stays as it was."""
        with isolate_rng():
            seed_all(self.seed, "prepare", round_idx)
            there = run.devices.present(round_idx, now_seconds, self._asked(round_idx))
            self.algorithm.prepare_round(round_idx, there, run)

    def _asked(self, round_idx: int) -> list[Client]:
        return uniform_cohort([*self.clients.values()], self.num_asked, self.seed, round_idx)
