"""What the clients of a round contribute to it, each as a whole; and who is left out since its training diverged.

A client with several visits in a round contributes when the last of them is done: if one of them diverges, nothing of the
client has been added up. A client sees NaN and Inf before it sends, so nothing goes up.
"""

import logging
from collections.abc import Mapping

from fedlight.callbacks.loop.buffers import BufferPolicy
from fedlight.callbacks.loop.round_schedule import RoundSchedule
from fedlight.federation.aggregation import Aggregation
from fedlight.federation.client import Update, Visit
from fedlight.federation.module_buffers import Buffers
from fedlight.federation.server import ServerOptimizer
from fedlight.federation.state import Diverged, State

logger = logging.getLogger("fedlight")


def refuse_lost_model(state: State, round_idx: int, server: ServerOptimizer) -> None:
    """Raises ``ValueError`` where the server's step has made a global model that is not finite, of movements that are.

    Args:
        state: the new global state.
        round_idx: the round.
        server: whose step it was.
    """
    for name, value in state.items():
        if not value.isfinite().all():
            raise ValueError(
                f"round {round_idx + 1}: {name} of the global model is not finite after the step of "
                f"{type(server).__name__}, so the run ends with the global model of the round before: lower "
                f"federated.server.lr={server.lr}, or the learning rate of the clients"
            )


class Contributions:
    """Of the clients of one round.

    Args:
        round_idx: the round.
        aggregation: of the movements.
        buffers: of the module.
        schedule: of the round's visits.

    Attributes:
        diverged: client id -> what was not finite, of those who are left out.
    """

    def __init__(
        self, round_idx: int, aggregation: Aggregation, buffers: BufferPolicy, schedule: RoundSchedule
    ) -> None:
        self.diverged: dict[str, str] = {}
        self._round_idx = round_idx
        self._aggregation = aggregation
        self._buffers = buffers
        self._schedule = schedule
        self._waiting: dict[str, list[tuple[Update, Buffers, int]]] = {}

    def refuse_left_out(self, client_id: str) -> None:
        """Raises :class:`Diverged` for a client of which an earlier visit of the round diverged."""
        if client_id in self.diverged:
            raise Diverged(self.diverged[client_id])

    def add(self, visit: Visit, update: Update | None, buffers: Buffers, num_examples: int) -> None:
        """Takes what a visit has given; it counts once the client's last visit of the round is done."""
        if update is not None:
            self._waiting.setdefault(visit.client_id, []).append((update, buffers, num_examples))
        if self._schedule.is_last(visit):
            for each, changed, examples in self._waiting.pop(visit.client_id, []):
                self._aggregation.add(each)
                self._buffers.add(changed, examples)

    def leave_out(self, client_id: str, why: Diverged) -> None:
        """Leaves a client out of the round, with all that its visits have given."""
        self.diverged.setdefault(client_id, str(why))
        self._waiting.pop(client_id, None)

    def result(self, hints: Mapping[str, object]) -> State:
        """The combined movement of those who are left; who is not, is named in a warning.

        Args:
            hints: settings by name, on which it depends whether training diverges.

        Raises:
            ValueError: all have diverged.
        """
        if self.diverged:
            clients = {visit.client_id for visit in self._schedule.begins.values()}
            client_id, first = next(iter(self.diverged.items()))
            settings = ", ".join(f"{name}={value}" for name, value in hints.items())
            why = f"NaN or Inf in what they trained; {client_id}: {first}"
            remedy = (
                f"With {settings}: lower the learning rate, or set trainer.gradient_clip_val to 1.0 or less"
            )
            if len(self.diverged) == len(clients):
                raise ValueError(
                    f"round {self._round_idx + 1}: all {len(clients)} clients diverged ({why}), so the run ends with "
                    f"the global model of the round before. {remedy}"
                )
            logger.warning(
                "round %s: %s of %s clients diverged and are left out: %s (%s). %s",
                *(
                    self._round_idx + 1,
                    len(self.diverged),
                    len(clients),
                    ", ".join(self.diverged),
                    why,
                    remedy,
                ),
            )
        return self._aggregation.result()
