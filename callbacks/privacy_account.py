"""What a federated run has leaked of a client so far, where its aggregation or its wire is private."""

from fedlight.federation.aggregation import Aggregation
from fedlight.federation.channel import Channel
from fedlight.federation.privacy import Private

DELTA = 1e-5
"""Chance that the epsilon that is logged does not hold; it should be below one over the number of clients."""


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
        parts = (("epsilon", aggregation), ("epsilon_local", channel))
        self._parts: dict[str, Private] = {}
        for name, part in parts:
            if isinstance(part, Private) and part.epsilon(DELTA, []) is not None:
                self._parts[name] = part

    @property
    def is_private(self) -> bool:
        """Whether something of the run promises differential privacy."""
        return bool(self._parts)

    def after_round(self, sampled: int, clients: int) -> dict[str, float]:
        """Counts a round, and gives epsilon at delta 1e-5 after it.

        Args:
            sampled: clients that were asked, also those that dropped out.
            clients: clients that could have been.

        Returns:
            ``epsilon`` towards those who see the models, ``epsilon_local`` towards the server; absent where nothing is
            private.
        """
        if self._parts:
            self.rounds.append((sampled, clients))
        found = {name: part.epsilon(DELTA, self.rounds) for name, part in self._parts.items()}
        return {name: value for name, value in found.items() if value is not None}
