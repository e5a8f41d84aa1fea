"""Privacy account of a run: epsilon after each round, of a private aggregation or channel."""

from fedlight.callbacks.loop.parts.part import Part
from fedlight.callbacks.loop.run import Run
from fedlight.callbacks.loop.visits.round import OpenRound
from fedlight.federation.algorithm import Aggregation
from fedlight.federation.client import Channel, State
from fedlight.federation.privacy import Private


class PrivacyAccount(Part):
    """Privacy account of a run with a private aggregation or channel.

    Attributes:
        rounds: (clients sampled, number of clients) -> number of such rounds; epsilon depends on nothing else.

    Raises:
        ModuleNotFoundError: something is private and the accountant is not installed.
    """

    def __init__(self, aggregation: Aggregation | None, channel: Channel) -> None:
        self.rounds: dict[tuple[int, int], int] = {}
        self._parts: dict[str, tuple[Private, float]] = {}
        parts: dict[str, object] = {"": aggregation, "_local": channel}
        for end, part in parts.items():
            if isinstance(part, Private) and part.delta is not None:
                part.epsilon(part.delta, [])  # asks whether the accountant is installed
                self._parts[end] = part, part.delta

    @property
    def is_private(self) -> bool:
        """Whether the aggregation or the channel promises differential privacy."""
        return bool(self._parts)

    def meet(self, run: Run) -> None:
        """Raise ValueError unless delta < 1 / clients: otherwise revealing one client whole would be private."""
        clients = len(run.clients)
        for part, delta in self._parts.values():
            if delta * clients >= 1:
                raise ValueError(
                    f"{type(part).__name__}: delta={delta:g} is not below one over the {clients:,} clients, so that giving "
                    f"away all that one of them holds would count as private: set it to {0.1 / clients:.0e} or less"
                )

    def finish_round(self, run: Run, round: OpenRound, movement: State) -> dict[str, float]:
        return self.after(run.planned.num_asked, len(run.clients))  # dropouts count: they were sampled

    def after(self, sampled: int, clients: int) -> dict[str, float]:
        """Count a round with ``sampled`` of ``clients`` asked, and return epsilon after it.

        Returns:
            ``epsilon`` and ``delta`` towards observers of the models, ``epsilon_local`` and ``delta_local`` towards the
                server; absent where nothing is private.
        """
        if self._parts:
            self.rounds[sampled, clients] = self.rounds.get((sampled, clients), 0) + 1
        spent: dict[str, float] = {}
        for end, (part, delta) in self._parts.items():
            epsilon = part.epsilon(delta, self.rounds)
            if epsilon is not None:
                spent |= {f"epsilon{end}": epsilon, f"delta{end}": delta}
        return spent
