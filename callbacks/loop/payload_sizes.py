"""How much a visit will send, known before it begins."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fedlight.callbacks.loop.buffers import BufferPolicy
from fedlight.federation.algorithm import Algorithm
from fedlight.federation.channel import Channel
from fedlight.federation.client import Client, Visit
from fedlight.federation.client_state import ClientMemories
from fedlight.federation.state import State

Sizes = tuple[frozenset[str], int, int]
"""Of a visit: names of the parameters that it trains, bytes down, bytes up."""


@dataclass(frozen=True)
class PayloadSizes:
    """Tells it from what the algorithm says, by names and shapes alone.

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

    def of(self, visit: Visit, state: State) -> Sizes:
        """Names of the parameters that the client trains, bytes down, bytes up.

        Args:
            visit: which one.
            state: the global state, of which names and shapes count alone.
        """
        client = replace(self.clients[visit.client_id], memory=self.memory.load(visit.client_id))
        shared = self.buffers.shared(state)
        down, up = self.algorithm.payloads(visit, client, shared)
        trained = frozenset(name for name in state if name in (down or state) or name not in shared)
        down_bytes, up_bytes = self.channel.down_bytes(down), self.channel.up_bytes(up)
        also = self.buffers.num_bytes
        return trained, down_bytes + (also if down else 0), up_bytes + (also if up else 0)
