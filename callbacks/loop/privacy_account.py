"""What a federated run has leaked of a client so far, where its aggregation or its wire is private."""

from fedlight.federation.aggregation import Aggregation
from fedlight.federation.channel import Channel
from fedlight.federation.privacy import Private


class PrivacyAccount:
    """Counts the rounds, and says epsilon after them.

    Args:
        aggregation: of the run; None for an algorithm's own, which is not private.
        channel: of the run.

    Attributes:
        rounds: clients sampled and clients of each round; plain values, for a checkpoint.

    Raises:
        ModuleNotFoundError: something is private and the accountant is not installed.
    """

    def __init__(self, aggregation: Aggregation | None, channel: Channel) -> None:
        self.rounds: list[tuple[int, int]] = []
        self._parts: dict[str, tuple[Private, float]] = {}
        parts: dict[str, object] = {"": aggregation, "_local": channel}
        for end, part in parts.items():
            if isinstance(part, Private) and part.delta is not None:
                part.epsilon(part.delta, [])  # asks whether the accountant is installed
                self._parts[end] = part, part.delta

    @property
    def is_private(self) -> bool:
        """Whether something of the run promises differential privacy."""
        return bool(self._parts)

    def check(self, clients: int) -> None:
        """Refuses a delta that promises too little.

        Raises:
            ValueError: it is one over the number of clients or more, so that giving away one of them whole would be private.
        """
        for part, delta in self._parts.values():
            if delta * clients >= 1:
                raise ValueError(
                    f"{type(part).__name__}: delta={delta:g} is not below one over the {clients:,} clients, so that giving "
                    f"away all that one of them holds would count as private: set it to {0.1 / clients:.0e} or less"
                )

    def after_round(self, sampled: int, clients: int) -> dict[str, float]:
        """Counts a round, and gives epsilon after it.

        Args:
            sampled: clients that were asked, also those that dropped out.
            clients: clients that could have been.

        Returns:
            ``epsilon`` and ``delta`` towards those who see the models, ``epsilon_local`` and ``delta_local`` towards the
            server; absent where nothing is private.
        """
        if self._parts:
            self.rounds.append((sampled, clients))
        found: dict[str, float] = {}
        for end, (part, delta) in self._parts.items():
            epsilon = part.epsilon(delta, self.rounds)
            if epsilon is not None:
                found |= {f"epsilon{end}": epsilon, f"delta{end}": delta}
        return found
