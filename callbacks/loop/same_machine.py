"""Where clients train when no devices are emulated: on this machine, all of them, as it is."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from fedlight.callbacks.loop.round_table import Row
from fedlight.federation.client import Client, Visit


class SameMachine:
    """What the federated loop asks of the clients' devices, where they are none: everybody gets through every round.

    Attributes:
        round_end_seconds: virtual time at which the round ends.
    """

    round_end_seconds = 0.0

    def present(self, round_idx: int, now_seconds: float, clients: Sequence[Client]) -> list[Client]:
        """Those of them who are there when a round starts that is asked of them; the others are absent from it."""
        return [*clients]

    def by_base(self, clients: Sequence[Client]) -> Iterator[list[Client]]:
        """The clients in groups; while a group is looked at, the module computes on the base that its devices have."""
        if clients:
            yield [*clients]

    def at_server(self) -> AbstractContextManager[None]:
        """Has the server's own base under the module while its body runs, also in a visit to a client."""
        return nullcontext()

    def admit(
        self, round_idx: int, now_seconds: float, visits: Sequence[Visit], parameters: Mapping[str, Tensor]
    ) -> list[Visit]:
        """The visits of those who get through the round, in the order in which they are trained.

        Args:
            round_idx: the round.
            now_seconds: virtual time at which it starts.
            visits: of all who are asked.
            parameters: that are federated, of which names and shapes count alone.
        """
        return [*visits]

    def check_parameters(self, parameters: Mapping[str, Tensor]) -> None:
        """Before the first visit of a round: refuses other federated parameters than those that were planned with."""

    def device_name(self, client_id: str) -> str:
        """What reports call the client's device."""
        return ""

    def dropouts(self, round_idx: int) -> list[Row]:
        """A row for each client that was asked and did not get through, with what it spent until then."""
        return []

    def enter(self, visit: Visit) -> None:
        """Before a visit: makes the module what it is on the client's device."""

    def restore(self) -> None:
        """After the last visit of a round, or when one was broken off: the server has its own module back."""

    def visited(self, visit: Visit, row: Row) -> Row:
        """The row of a finished visit, with what it took on the client's device."""
        return row

    def metrics(self, rows: Sequence[Row]) -> dict[str, float]:
        """What is logged of a round that is over."""
        return {}
