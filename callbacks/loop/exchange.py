"""A visit under way in the federated loop, and what goes over the wire at its two ends."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedlight.callbacks.loop.federated_run import seed_all
from fedlight.callbacks.loop.local_work import LocalWork
from fedlight.federation.algorithm import Algorithm
from fedlight.federation.channel import Channel, Payload
from fedlight.federation.client import Client, Update, Upload, Visit, Visiting, Work
from fedlight.federation.state import Diverged, State, moved, refuse_not_finite


@dataclass
class OpenVisit:
    """What the loop keeps of a visit under way.

    Attributes:
        visiting: what the algorithm keeps of it.
        parameters: the module's parameters that the client trains, by name.
        bytes_down: received by the client.
        work: what has been done so far.
        bytes_up: sent back by the client; 0 until then.
    """

    visiting: Visiting
    parameters: Mapping[str, Tensor]
    bytes_down: int
    work: LocalWork
    bytes_up: int = 0


class Exchange:
    """What goes between the server and the clients in the visits of one round.

    Args:
        algorithm: says what is sent.
        channel: the way to the clients and back.
        seed: of what the wire draws.
        round_idx: the round.
        state: the parameters that are shared, as the server has them.
        buffer_bytes: of the buffers that go with what is sent, one way.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        channel: Channel,
        seed: int,
        round_idx: int,
        state: State,
        buffer_bytes: int = 0,
    ) -> None:
        self.algorithm = algorithm
        self.channel = channel
        self.seed = seed
        self.round_idx = round_idx
        self.state = state
        self.buffer_bytes = buffer_bytes
        self._arrived: tuple[str, State, State] | None = None
        self._upload: Upload | None = None

    def down(self, visit: Visit, client: Client, before: Visiting | None) -> tuple[Visiting, int]:
        """Send to the client at the start of a visit what the algorithm says.

        Args:
            visit: that starts.
            client: with its memory.
            before: the client's visit before this one in the round.

        Returns:
            The visit under way, and the bytes that went down.
        """
        sent, num_bytes = self.algorithm.send(visit, client, self.state), 0
        received: State = before.received if before else {}
        if sent is not None:
            payload = self.channel.down(sent, client)
            received, num_bytes = payload.state, self._with_buffers(payload)
        visiting = self.algorithm.start_visit(visit, client, received)
        visiting.before = before
        return visiting, num_bytes

    def up(self, visiting: Visiting, trained: State, work: Work) -> tuple[Update | None, int]:
        """Send to the server at the end of a visit what the client replies.

        Returns:
            What the algorithm makes of it for the aggregation, if anything, and the bytes that went up.

        Raises:
            Diverged: something of it is not finite; then nothing is sent.
        """
        refuse_not_finite(trained, "trained")
        reply = self.algorithm.reply(visiting, trained, work)
        visit, client, received = visiting.visit, visiting.client, visiting.received
        seed_all(self.seed, "wire", self.round_idx, visit.client_id, visit.split)
        payload = self.channel.up(received, reply, client, reply.keys() - self.state.keys())
        refuse_not_finite(payload.state, "the movement of")
        update = self.algorithm.finish_visit(visiting, payload.state, work)
        if update is not None and not math.isfinite(update.weight):
            raise Diverged(f"its weight {update.weight} is not finite")
        if update is not None:
            self._arrived = client.id, received, payload.state
        return update, self._with_buffers(payload)

    def _with_buffers(self, payload: Payload) -> int:
        return payload.num_bytes + self.buffer_bytes if payload.state else payload.num_bytes

    @property
    def upload(self) -> Upload | None:
        """What the server got in the last visit that gave an update; None in a round until the first has come.

        Only the parameters: what an algorithm sends beside them, such as control variates, is left out.
        """
        if self._arrived is not None:  # put together once, and only where somebody looks
            client_id, received, movement = self._arrived
            own = {name: received[name] for name in movement if name in self.state}
            self._upload, self._arrived = Upload(self.round_idx, client_id, moved(own, movement)), None
        return self._upload
