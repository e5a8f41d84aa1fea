"""How much visits will send, known before they begin."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fedlight.callbacks.loop.buffers import BufferPolicy
from fedlight.federation.algorithm import Algorithm, predict_payloads
from fedlight.federation.channel import Channel
from fedlight.federation.client import Client, Visit
from fedlight.federation.client_state import ClientMemories
from fedlight.federation.state import State

Sizes = tuple[frozenset[str], int, int]
"""Of a visit: names of the parameters that it trains, bytes down, bytes up."""


@dataclass(frozen=True)
class PayloadSizes:
    """Sizes of what visits send, by the hooks of the algorithm, from names and shapes alone.

    Attributes:
        algorithm: says what goes down and comes back.
        channel: says how many bytes that takes.
        memory: of the clients, on which it may depend.
        clients: all clients by id.
        buffers: which of the parameters stay with a client, and what goes with those that are sent.
    """

    algorithm: Algorithm
    channel: Channel
    memory: ClientMemories
    clients: Mapping[str, Client]
    buffers: BufferPolicy

    def of(self, client_id: str, visits: Sequence[Visit], state: State) -> dict[Visit, Sizes]:
        """Return names of the trained parameters, bytes down and bytes up of each visit to a client in one round.

        Args:
            client_id: the client.
            visits: in their order.
            state: the global state, of which names and shapes count alone.

        Raises:
            ValueError: the algorithm's hooks look at values.
        """
        client = replace(self.clients[client_id], memory=self.memory.load(client_id))
        shared, also = self.buffers.shared(state), self.buffers.num_bytes
        local = state.keys() - shared.keys()
        sizes = {}
        for visit, found in zip(
            visits, predict_payloads(self.algorithm, visits, client, shared), strict=True
        ):
            down, up = self.channel.down_bytes(found.down), self.channel.up_bytes(found.up)
            trained = frozenset(found.start.keys() | local)
            sizes[visit] = trained, down + (also if found.down else 0), up + (also if found.up else 0)
        return sizes
