"""Data whose clients make training examples for themselves, with the model as it stands."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import nn

SYNTHETIC = "synthetic"
"""``split`` of a visit that trains on the chosen candidates of a client."""
MIXED = "mixed"
"""``split`` of a visit that trains on chosen candidates and the client's own examples, shuffled together."""


@runtime_checkable
class SynthesizesData(Protocol):
    """Data whose clients make candidates for training and choose among them; candidates stay with the client.

    Candidates are a function of the round, the client, its own examples and the module as it stands. No random stream is
    advanced, and the module keeps its mode.
    """

    def synthesize(self, round_idx: int, client_ids: Sequence[str], module: nn.Module) -> None:
        """Make new candidates for these clients, with the module as it stands.

        It may be called several times in a round, each time for other clients, whose devices or own models differ.
        Candidates of an earlier round are dropped, those of other clients in the same round stay.

        Args:
            round_idx: round in which the candidates are trained on.
            client_ids: clients that make candidates.
            module: module that writes them.
        """

    def choose(self, client_id: str, module: nn.Module) -> None:
        """Score the client's candidates by the module as it stands and keep the best; no pass is made if all are kept.

        It is called before the first batch of the client's visit is asked for.
        """

    def num_synthetic(self, client_id: str) -> int:
        """Return how many examples ``choose`` keeps, or will keep; 0 for a client without candidates."""

    def synthesis_metrics(self) -> dict[str, float]:
        """Return counts over all candidates of the last round that has some."""

    def reset_synthesis(self) -> None:
        """Drop the candidates of all clients."""
