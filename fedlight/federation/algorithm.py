"""A federated algorithm: a few hooks around the visits of a round, whose defaults together are FedAvg.

The movement form, ``w <- w + sum of weighted movements``, is for ``unbiased`` eq. 8 of FedBis (Wu et al., "Towards
Federated RLHF with Aggregated Client Preference for LLMs", ICLR 2025, https://arxiv.org/abs/2407.03038). Eq. 8 averages
parameters with weights that sum to 1 only in expectation, so a round of large clients would inflate the model itself;
weighting movements has the same expectation and leaves the received model alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn

from fedlight.federation.aggregation import Aggregation, WeightedSum
from fedlight.federation.client import Client, NumBatches, Update, Visit, Work
from fedlight.federation.federation import Federation, refuse_several_adapters
from fedlight.federation.state import State

Weighting = Literal["unbiased", "normalized", "uniform"]


class Algorithm:
    """The hooks that the federated loop calls, in the order of a round; override what differs from FedAvg.

    Args:
        weighting: with M clients of which A are sampled and ``p_m`` a client's share of all examples,
            ``unbiased``: ``M / A * sum(p_m * delta_m)``, the mean over all clients in expectation (FedBis, eq. 8);
            ``normalized``: ``sum(p_m * delta_m) / sum(p_m)`` over the sampled;
            ``uniform``: the plain mean over the sampled.

    Attributes:
        buffers: what can be done under it about buffers that training changes: values of ``federated.buffers``.

    Raises:
        ValueError: another weighting.
    """

    buffers: tuple[str, ...] = ("refuse", "average", "local")

    def __init__(self, weighting: Weighting = "unbiased") -> None:
        if weighting not in ("unbiased", "normalized", "uniform"):
            raise ValueError(f"weighting={weighting!r} is not one of unbiased, normalized, uniform")
        self.weighting = weighting

    def check(self, federation: Federation) -> None:
        """Before the first round: refuses what the algorithm cannot work with.

        Raises:
            ValueError: it cannot.
        """
        refuse_several_adapters(federation.module, type(self).__name__)

    def prepare_round(self, round_idx: int, cohort: Sequence[Client], federation: Federation) -> None:
        """Before the visits of a round that will take place are planned; the module holds the global state.

        The cohort is all who are asked and there; with a fleet some of them may not get through. Global random streams are
        seeded for this round, and what is drawn from them here changes nothing that is drawn elsewhere.
        """

    def plan(self, round_idx: int, cohort: Sequence[Client], num_batches: NumBatches) -> list[Visit]:
        """The visits of a round, in the order in which they are trained: one per client.

        Visits of one client follow each other. It is also called once before :meth:`check`, with all clients, so that
        Lightning has a training loader as long as the longest visit; that plan is not trained.
        """
        return [Visit(client.id, num_batches(client.id)) for client in cohort]

    def start_round(self, round_idx: int, cohort: Sequence[Client], federation: Federation) -> None:
        """Before the first visit of a round; the module holds the global state."""

    def send(self, visit: Visit, client: Client, state: State) -> State | None:
        """What goes down to the client: by default the global state; part of it, or tensors of the algorithm's own.

        None in a further visit of the client in the round: nothing goes down, it still has what it received.
        """
        return state

    def payloads(self, visit: Visit, client: Client, state: State) -> tuple[State, State]:
        """What goes down and what comes back, by name and shape alone, known before the round has started.

        From it follow the bytes by which a slow device is late; the client's memory is there. By default the global
        state, both ways; override it together with :meth:`send` and :meth:`reply`. Of nothing the state is ``{}``.
        """
        return state, state

    def start_visit(self, visit: Visit, client: Client, received: State, module: nn.Module) -> State:
        """The parameters from which the client trains: by default those that it received."""
        return received

    def adjust_gradients(self, client: Client, received: State, parameters: Mapping[str, Tensor]) -> None:
        """Changes gradients in place before an optimizer step, after unscaling and before clipping.

        ``parameters`` are those of the optimizer that steps; of several, each has its own. Where an optimizer evaluates its
        closure several times in a step, as LBFGS does, gradients are changed at each evaluation.
        """

    def reply(self, visit: Visit, client: Client, received: State, trained: State, work: Work) -> State:
        """What the client sends back, under names that it received: by default what it trained."""
        return trained

    def finish_visit(self, visit: Visit, client: Client, movement: State, work: Work) -> Update | None:
        """What the server adds up, given the movement (reply minus received) that reached it; None for nothing."""
        return Update(client.id, movement, 1.0 if self.weighting == "uniform" else client.share)

    def leave_out(self, visit: Visit, client: Client) -> None:
        """A visit diverged, so the client is left out of the round: forgets what its visits of the round have left here.

        Nothing of the visit was replied or finished. The module holds the global state; the client's memory becomes what it
        was before the round. Further visits of the client in the round are trained, and their results thrown away.
        """

    def aggregation(self, num_clients: int) -> Aggregation:
        """A fresh aggregation for one round of a federation of ``num_clients``."""
        if self.weighting == "unbiased":
            return WeightedSum("count", scale=num_clients)
        return WeightedSum("weight")

    def finish_round(self, movement: State) -> State:
        """What the server's optimizer gets of the combined movement: all but the algorithm's own tensors."""
        return movement

    def own_state(self, client: Client) -> State | None:
        """The parameters with which the client would go on alone; None for the global ones."""
        return None

    def metrics(self) -> dict[str, float]:
        """What is logged with the round, as ``fed/NAME``."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: tensors and plain values only.

        Between rounds tensors are replaced by new ones: a checkpoint that is written inside a round has those from here.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what ``state_dict`` gave."""


def changes_gradients(algorithm: Algorithm) -> str | None:
    """The name of an algorithm that changes gradients; None for one that leaves them alone."""
    kind = type(algorithm)
    return None if kind.adjust_gradients is Algorithm.adjust_gradients else kind.__name__
