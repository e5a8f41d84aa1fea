"""View of a federated loop for other callbacks."""

from contextlib import AbstractContextManager

import lightning as L

from fedlight.callbacks.loop.parts.buffers import BufferPolicy
from fedlight.callbacks.loop.run import Run
from fedlight.callbacks.loop.visits.round import OpenRound
from fedlight.callbacks.loop.visits.visit import OpenGroup
from fedlight.devices.memory import Train
from fedlight.federation.client import OWN_STATE, State, Visit
from fedlight.federation.client_state import ClientMemories
from fedlight.federation.forward.zeroth_order import ZerothOrder
from fedlight.support.checks import Checked


class LoopView(Checked, L.Callback):
    """Base of the loop: the visits under way, the clients' own models, and the global one put into the module.

    Attributes:
        group: visits under way, side by side; an ended group stays until the next begins or the round is over.
    """

    forward: ZerothOrder | None
    memory: ClientMemories
    buffers: BufferPolicy
    group: OpenGroup
    _run: Run
    _round: OpenRound | None

    @property
    def train(self) -> Train:
        """How clients train: ``backprop``, ``forward``, or ``auto`` for the first of them that fits the device."""
        return "backprop" if self.forward is None else self.forward.train

    @property
    def visit(self) -> Visit | None:
        """First visit of the group under way, or None."""
        return self.group.visits[0].visiting.visit if self.group.visits else None

    @property
    def visits(self) -> list[Visit]:
        """Visits of the group under way; they stay until the next group begins or the round is over."""
        return [open_visit.visiting.visit for open_visit in self.group.visits]

    @property
    def device_name(self) -> str:
        """Device of the visit under way; empty between visits and without a fleet."""
        return self._run.devices.device_name(self.visit.client_id) if self.visit else ""

    def own_state(self, client_id: str) -> State | None:
        """Return parameters and buffers that a client would continue to train alone; None for the global ones."""
        memory = self.memory.load(client_id)
        return self.buffers.own_state(memory, memory.get(OWN_STATE))

    def holding(self, state: State) -> AbstractContextManager[None]:
        """Put ``state`` and the server's base into the module while the body runs; then restore it bit for bit."""
        return self._run.at_server(state)

    def before_round(self) -> AbstractContextManager[None]:
        """Put the global model from before the round into the module while the body runs."""
        self.group.unstack()  # the state is of one client, not of several stacked
        buffers = {name: b for name, b in self.buffers.round_start.items() if b is not None}
        assert self._round is not None
        return self.holding(self._round.opened | buffers)
