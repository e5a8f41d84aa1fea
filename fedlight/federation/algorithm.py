"""Base class of federated algorithms: hooks around the visits of a round, whose defaults together are FedAvg.

The movement form, ``w <- w + sum of weighted movements``, is for ``unbiased`` eq. 8 of FedBis (Wu et al., "Towards
Federated RLHF with Aggregated Client Preference for LLMs", ICLR 2025, https://arxiv.org/abs/2407.03038). Eq. 8 averages
parameters with weights that sum to 1 only in expectation, so a round of large clients would inflate the model itself;
weighting movements has the same expectation and leaves the received model alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedlight.federation.aggregation import Aggregation, WeightedSum
from fedlight.federation.client import Client, Update, Visit, Visiting, Work
from fedlight.federation.lora.ranks import cut_to_rank, rank_of
from fedlight.federation.protocols import Federation, NumBatches, refuse_several_adapters
from fedlight.federation.state import State, moved
from fedlight.support.checks import Checked

Weighting = Literal["unbiased", "normalized", "uniform"]


class Algorithm(Checked):
    """Hooks that the federated loop calls in each round; override what differs from FedAvg.

    Hooks of the server, in the order of a round: ``prepare_round``, ``plan``, ``start_round``; for each visit ``send`` and
    ``finish_visit``; ``aggregation``, ``partial`` and ``merge``, ``finish_round``. Hooks of a client, in each of its visits:
    ``start_visit``, ``adjust_gradients``, ``reply``. What belongs to one visit is kept in its `Visiting`, never in
    attributes of the algorithm, as several visits may be under way.

    Before a round, the loop of a run with devices calls ``send``, ``start_visit`` and ``reply`` on meta tensors, to know how
    many bytes each client will send (`predict_payloads`). These three hooks depend on names and shapes, not on values.

    Args:
        weighting: with M clients of which A are sampled and ``p_m`` a client's share of all examples,
            ``unbiased``: ``M / A * sum(p_m * delta_m)``, the mean over all clients in expectation (FedBis, eq. 8);
            ``normalized``: ``sum(p_m * delta_m) / sum(p_m)`` over the sampled;
            ``uniform``: the plain mean over the sampled.

    Attributes:
        buffers: values of ``federated.buffers`` that make sense under the algorithm.
        deployable: whether server and clients may be in processes of their own, which share nothing but what is sent and
            what `tell` returns. Both then call ``start_visit`` and ``finish_visit``: what these keep in the client's memory
            is the client's.
        sums_alone: whether the server needs nothing of a round but the sum of ``finish_visit``'s updates, all of the same
            tensors with weights that follow from ``weighting``, so that secure aggregation can hide the single ones. It
            holds for the very class that sets it, not for those derived from it.

    Raises:
        ValueError: another weighting.
    """

    buffers: tuple[str, ...] = ("refuse", "average", "local")
    deployable: bool = True
    sums_alone: bool = False

    def __init__(self, weighting: Weighting = "unbiased") -> None:
        if weighting not in ("unbiased", "normalized", "uniform"):
            raise ValueError(f"weighting={weighting!r} is not one of unbiased, normalized, uniform")
        self.weighting = weighting

    # The server

    def check_settings(self, federation: Federation) -> None:
        """Raise ValueError, before the module's model is loaded, for settings or data that do not suit the algorithm.

        The module has no parameters yet and the trainer no optimizers; what needs them belongs into `check`.
        """

    def check(self, federation: Federation) -> None:
        """Raise ValueError, before the first round, for a run with which the algorithm cannot work."""
        self.check_settings(federation)
        refuse_several_adapters(federation.module, type(self).__name__)

    def prepare_round(self, round_idx: int, cohort: Sequence[Client], federation: Federation) -> None:
        """Do what has to be done before the visits of a round can be planned, such as making training data.

        The module holds the global state. The cohort is all who are asked and present; with a fleet some of them may not
        get through. Random streams are seeded for this round, and what is drawn here changes nothing drawn elsewhere.
        """

    def plan(self, round_idx: int, cohort: Sequence[Client], num_batches: NumBatches) -> list[Visit]:
        """Return the visits of a round in the order in which they are trained: by default one for each client.

        Visits of one client follow each other. It is also called once before `check`, with all clients, so that
        Lightning has a training loader as long as the longest visit; that plan is not trained.
        """
        return [Visit(client.id, num_batches(client.id)) for client in cohort]

    def start_round(self, round_idx: int, cohort: Sequence[Client], federation: Federation) -> None:
        """Do what has to be done when a round begins; the module holds the global state.

        The round before is validated, logged and saved by now, which it is not in `prepare_round` of a run that is
        resumed. The cohort is all who get through the round.
        """

    def send(self, visit: Visit, client: Client, state: State) -> State | None:
        """Return what goes down to the client: the global state, part of it, or tensors of the algorithm's own beside it.

        None in a further visit of the client in the round sends nothing: the client still has what it received.
        """
        return state

    def finish_visit(self, visiting: Visiting, movement: State, work: Work) -> Update | None:
        """Return what the server adds up, given the movement (reply minus received) that reached it; None for nothing."""
        client = visiting.client
        return Update(client.id, movement, 1.0 if self.weighting == "uniform" else client.share)

    def uploaded(self, visiting: Visiting, movement: State) -> State:
        """Return the parameters that the server knows of a client by its reply, as an attacker there would have them.

        By default those that it received, moved. Asked only where somebody looks, and, unless it is overridden, of visits
        whose reply has parameters.
        """
        return moved({name: visiting.received[name] for name in movement}, movement)

    def aggregation(self, num_clients: int) -> Aggregation:
        """Return a fresh aggregation for one round of a federation of ``num_clients``."""
        if self.weighting == "unbiased":
            return WeightedSum("count", scale=num_clients)
        return WeightedSum("weight")

    def finish_round(self, movement: State) -> State:
        """Return what the server's optimizer gets of the combined movement: all but the algorithm's own tensors."""
        return movement

    def tell(self, client_ids: Sequence[str]) -> dict[str, Any]:
        """Return what the hooks of these clients need of the server's attributes, as values of JSON, once a round has begun.

        The clients of a deployment are in processes of their own, where `hear` takes it. It must not name other clients.
        """
        return {}

    def hear(self, told: Mapping[str, Any]) -> None:
        """Take what `tell` returned at the server, before the visits of a round are planned."""

    def partial(self) -> dict[str, Any]:
        """Return what the visits of a round have left in attributes so far, as tensors and plain values, and start anew.

        Several processes train the visits of a round; before ``finish_round`` each of them merges the parts of all.
        """
        return {}

    def pieces(self) -> Iterator[dict[str, Any]]:
        """Start anew now, and return the result of ``partial`` in pieces, each of which ``merge`` takes."""
        return iter([self.partial()])

    def merge(self, partial: Mapping[str, Any]) -> None:
        """Add the result of ``partial`` in one of the processes; its order among them must not matter."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: tensors and plain values only.

        Between rounds tensors are replaced by new ones: a checkpoint that is written inside a round has those from here.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what ``state_dict`` gave."""

    def _refuse_without(self, state: Mapping[str, Any], key: str, what: str) -> None:
        """Raise ValueError for a checkpoint's state without a key that this algorithm always writes."""
        if key not in state:
            name = type(self).__name__
            raise ValueError(
                f"the checkpoint has no {what}, so another algorithm than {name} made it: resume with that one"
            )

    # A client

    def start_visit(self, visit: Visit, client: Client, received: State) -> Visiting:
        """Return the visit under way, with the parameters from which the client trains: by default those it received."""
        return Visiting(visit, client, received, start=received)

    def adjust_gradients(
        self, visiting: Visiting, parameters: Mapping[str, Tensor], gradients: dict[str, Tensor]
    ) -> None:
        """Change gradients in place before an optimizer step, after unscaling and before clipping.

        With several optimizers, each step gets the parameters of its own optimizer. Where an optimizer evaluates its closure
        several times in a step, as LBFGS does, gradients are changed at each evaluation.

        Args:
            visiting: the client's visit.
            parameters: the parameters as they are, by name; not to be changed.
            gradients: those that have one, by name. A tensor put under the name of another parameter becomes its gradient. A
                parameter whose gradient is taken out of the dictionary is left out of the step: neither momentum nor weight
                decay moves it. With clients side by side all of a group have to leave out the same ones. In a forward-only
                visit these are estimates, and the hook is called for one parameter at a time.
        """

    def reply(self, visiting: Visiting, trained: State, work: Work) -> State:
        """Return what the client sends back: by default what it trained.

        What it did not receive, such as tensors of the algorithm's own, reaches the server as it is.

        A client that is left out of the round, as its training diverged, replies as if it had not moved, and that reply is
        thrown away.
        """
        return trained


@dataclass(frozen=True)
class Payloads:
    """Meta tensors of one visit, known before its round has started; what goes down or up is empty for nothing.

    ``memory`` is the client's after the visit.
    """

    down: State
    up: State
    start: State
    memory: dict[str, Any] = field(default_factory=dict)


def predict_payloads(
    algorithm: Algorithm,
    visits: Sequence[Visit],
    client: Client,
    state: State,
    gone_per_batch: float = 0.0,
    again: bool = False,
) -> list[Payloads]:
    """Return what a client's visits of one round will send, by asking ``send``, ``start_visit`` and ``reply``.

    Of the global state and the client's memory only names and shapes count. Forward-only visits have ``gone_per_batch``
    entries in ``Work.gone`` for each of their batches. With ``again`` the client remembers such visits of an earlier round.

    Raises:
        ValueError: a hook looks at the values of tensors.
    """
    client = replace(client, memory=_shapes(client.memory))
    state, rank = _shapes(state), rank_of(client)
    found: list[Payloads] = []
    try:
        for _ in range(2 if again else 1):
            found = _predicted(algorithm, visits, client, state, rank, gone_per_batch)
    except (RuntimeError, TypeError) as error:  # of torch, for an operation that needs values
        raise ValueError(
            f"how many bytes {type(algorithm).__name__} sends cannot be known before a round, as its send, start_visit or "
            f"reply looks at values of tensors ({error}): have these hooks depend on names and shapes alone"
        ) from error
    return found


def _predicted(
    algorithm: Algorithm,
    visits: Sequence[Visit],
    client: Client,
    state: State,
    rank: int | None,
    gone_per_batch: float,
) -> list[Payloads]:
    """Return the payloads of one round; the client remembers its replies."""
    received, found = State(), []
    before: Visiting | None = None
    for visit in visits:
        sent = algorithm.send(visit, client, state)
        received = received if sent is None else _shapes(sent)
        visiting = algorithm.start_visit(visit, client, received)
        visiting.before, visiting.shapes_only = before, True
        visiting.lora_rank = rank
        start: State = _shapes(visiting.start)
        gone = ((0, 1.0),) * round(visit.num_batches * gone_per_batch)
        sums = dict.fromkeys(start, 1.0)
        work = Work(1, lr=1.0, mean_loss=1.0, seconds=0.0, lr_sums=sums, gone=gone)
        up = cut_to_rank(_shapes(algorithm.reply(visiting, start, work)), rank)
        down = {} if sent is None else cut_to_rank(received, rank)
        found.append(Payloads(down, up, start, _shapes(client.memory)))
        before = visiting
    return found


def _shapes(value: Any) -> Any:
    """Return ``value`` with meta tensors in the place of its tensors."""
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, dict):
        return {key: _shapes(item) for key, item in value.items()}
    return [_shapes(item) for item in value] if isinstance(value, list) else value


def changes_gradients(algorithm: Algorithm) -> str | None:
    """Return the name of an algorithm that changes gradients; None for one that leaves them alone."""
    kind = type(algorithm)
    return None if kind.adjust_gradients is Algorithm.adjust_gradients else kind.__name__


HOOKS_OF_LOCAL = ("check", "check_settings", "start_visit", "adjust_gradients")
"""Hooks that a local algorithm inside of another one may have."""


def refuse_more_than_gradients(local: Algorithm, inside: str, why: str = "") -> None:
    """Raise ValueError for a local algorithm that does more in a visit of the algorithm ``inside`` than change gradients."""
    for name, hook in vars(Algorithm).items():
        changed = callable(hook) and getattr(type(local), name) is not hook
        if changed and not name.startswith("_") and name not in HOOKS_OF_LOCAL:
            raise ValueError(
                f"local={type(local).__name__} changes {name}: inside {inside} a local algorithm may change gradients alone "
                f"(as FedProx does). {why}".rstrip()
            )


class WithLocal(Algorithm, ABC):
    """Base class of algorithms with a second algorithm, such as FedProx, for the gradients of their visits.

    Args:
        weighting: of the clients, as for `Algorithm`.
        local: algorithm that changes the gradients of a visit; None changes nothing. Its weighting plays no part.
        why: reason why it may change nothing else, for the error.

    Raises:
        ValueError: ``local`` does more than change gradients.
    """

    def __init__(self, weighting: Weighting, local: Algorithm | None, why: str = "") -> None:
        super().__init__(weighting)
        self.local = local or Algorithm()
        refuse_more_than_gradients(self.local, type(self).__name__, why)

    @abstractmethod
    def check(self, federation: Federation) -> None:
        super().check(federation)
        self.local.check(federation)

    def start_visit(self, visit: Visit, client: Client, received: State) -> Visiting:
        return self.local.start_visit(visit, client, received)

    def adjust_gradients(
        self, visiting: Visiting, parameters: Mapping[str, Tensor], gradients: dict[str, Tensor]
    ) -> None:
        self.local.adjust_gradients(visiting, parameters, gradients)
