"""What goes between the server and the clients in the visits of a round: down the wire and up again."""

import math

from fedlight.callbacks.loop.federated_run import seed_all
from fedlight.federation.algorithm import Algorithm
from fedlight.federation.channel import Channel, Payload
from fedlight.federation.client import Client, Update, Upload, Visit, Work
from fedlight.federation.divergence import Diverged, refuse_not_finite
from fedlight.federation.state import State, moved


class Exchange:
    """Sends and receives what an algorithm says, one visit after the other.

    Args:
        algorithm: that says it.
        channel: the way to the clients and back.
        seed: of what the wire draws.

    Attributes:
        also_bytes: of the buffers that go with what is sent, one way.
        received: what the client of the visit under way has received in this round.
        num_bytes: down and up, of this visit.
    """

    def __init__(self, algorithm: Algorithm, channel: Channel, seed: int) -> None:
        self.algorithm = algorithm
        self.channel = channel
        self.seed = seed
        self.also_bytes = 0
        self.start_round(0)

    def start_round(self, round_idx: int) -> None:
        """Forgets what was sent in the round before."""
        self.received: State = {}
        self.num_bytes = 0, 0
        self._round_idx = round_idx
        self._arrived: tuple[str, State, State] | None = None
        self._upload: Upload | None = None

    def down(self, visit: Visit, client: Client, state: State) -> State:
        """Sends to the client at the start of a visit, of the global ``state`` or of its own what the algorithm wants.

        Returns:
            What the client has by now.
        """
        self._names = state.keys()
        self.num_bytes = 0, 0
        sent = self.algorithm.send(visit, client, state)
        if sent is not None:
            payload = self.channel.down(sent, client)
            self.received, self.num_bytes = payload.state, (self._with_buffers(payload), 0)
        return self.received

    def up(self, visit: Visit, client: Client, trained: State, work: Work) -> Update | None:
        """Sends to the server at the end of a visit.

        Returns:
            What the algorithm makes of it for the aggregation, if anything.

        Raises:
            Diverged: something of it is not finite; then nothing is sent.
        """
        refuse_not_finite(trained, "trained")
        reply = self.algorithm.reply(visit, client, self.received, trained, work)
        seed_all(self.seed, "wire", self._round_idx, visit.client_id, visit.split)
        payload = self.channel.up(self.received, reply, client)
        refuse_not_finite(payload.state, "the movement of")
        update = self.algorithm.finish_visit(visit, client, payload.state, work)
        if update is not None and not math.isfinite(update.weight):
            raise Diverged(f"its weight {update.weight} is not finite")
        self.num_bytes = self.num_bytes[0], self._with_buffers(payload)
        if update is not None:
            self._arrived = client.id, self.received, payload.state
        return update

    def _with_buffers(self, payload: Payload) -> int:
        return payload.num_bytes + self.also_bytes if payload.state else payload.num_bytes

    @property
    def upload(self) -> Upload | None:
        """What the server got in the last visit that gave an update; None in a round until the first has come.

        Only the parameters: what an algorithm sends beside them, such as control variates, is left out.
        """
        if self._arrived is not None:  # put together once, and only where somebody looks
            client_id, received, movement = self._arrived
            own = {name: received[name] for name in movement if name in self._names}
            self._upload, self._arrived = Upload(self._round_idx, client_id, moved(own, movement)), None
        return self._upload
