"""What is decided in a round: the algorithm's hooks, how updates are combined, and the server's step.

The hooks' defaults, the weighted sum and the average are together FedAvg. Robust aggregations are in
`fedlight.federation.aggregation`, and further server optimizers in `fedlight.federation.server`.

The movement form, ``w <- w + sum of weighted movements``, is for ``unbiased`` eq. 8 of FedBis (Wu et al., "Towards
Federated RLHF with Aggregated Client Preference for LLMs", ICLR 2025, https://arxiv.org/abs/2407.03038). Eq. 8 averages
parameters with weights that sum to 1 only in expectation, so a round of large clients would inflate the model itself;
weighting movements has the same expectation and leaves the received model alone.
"""

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor

from fedlight.federation.client import Client, State, Update, Visit, Visiting, Work, moved
from fedlight.federation.exact_sum import ExactSums, digest_of
from fedlight.federation.protocols import Federation, NumBatches, refuse_several_adapters
from fedlight.support.checks import Checked


class ServerOptimizer(Checked, ABC):
    """Server optimizer that takes the combined movement as a step direction.

    Args:
        lr: server learning rate, above 0.
        moments: names of the moments that it keeps for each tensor between rounds.

    Raises:
        ValueError: ``lr`` is not above 0.
    """

    def __init__(self, lr: float, moments: tuple[str, ...] = ()) -> None:
        if not 0 < lr < math.inf:
            raise ValueError(f"lr={lr} must be above 0 and finite at the server; 1 is plain averaging")
        self.lr = lr
        self._moments: dict[str, State] = {moment: {} for moment in moments}

    @abstractmethod
    def direction(self, name: str, movement: Tensor) -> Tensor:
        """Return the direction of tensor ``name``, of the shape of its combined movement (fp64); called once a round."""

    def step(self, state: State, movement: State) -> State:
        """Return the new global state (fp32); names absent from ``movement`` keep their values and moments."""
        # A selector of FedBiscuit without sampled members neither coasts on its momentum nor loses it.
        return moved(state, {name: self.direction(name, value) for name, value in movement.items()}, self.lr)

    def state_dict(self) -> dict[str, Any]:
        """Return moment -> name -> tensor (fp64) for a checkpoint; `direction` replaces tensors by new ones."""
        return {moment: dict(tensors) for moment, tensors in self._moments.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned; without moments in the checkpoint they start anew.

        Raises:
            ValueError: the moments are those of another server optimizer.
        """
        if state and state.keys() != self._moments.keys():
            raise ValueError(
                f"the checkpoint's server remembers {sorted(state)}, but {type(self).__name__} needs "
                f"{sorted(self._moments)}: resume with the server of the checkpoint"
            )
        self._moments.update({moment: dict(tensors) for moment, tensors in state.items()})


class Average(ServerOptimizer):
    """Plain averaging: ``w <- w + lr * movement``.

    Args:
        lr: server learning rate, above 0.

    Raises:
        ValueError: ``lr`` is not above 0.

    Examples:
        >>> import torch
        >>> Average(0.5).step({"w": torch.tensor([1.0])}, {"w": torch.tensor([4.0])})["w"].item()
        3.0
    """

    def __init__(self, lr: float = 1.0) -> None:
        super().__init__(lr)

    def direction(self, name: str, movement: Tensor) -> Tensor:
        return movement


class Aggregation(Protocol):
    """Combination of the updates of one round, whatever their order."""

    keeps_factors: bool = False
    """Whether it has to know which LoRA factors clients have received and kept (`Update.received`)."""
    in_turn: bool = False
    """Whether clients have to take part in turn, each again once all others have, and not by lot."""

    def add(self, update: Update) -> None:
        """Take one client's update."""

    def partial(self) -> dict[str, Any]:
        """Return the partial result of the updates so far, as tensors and plain values, and start anew."""

    def pieces(self) -> Iterator[dict[str, Any]]:
        """Start anew now, and return the `partial` in pieces; `merge` takes each."""
        return iter([self.partial()])

    def merge(self, partial: Mapping[str, Any]) -> None:
        """Take the updates behind the `partial` of another aggregation of the same settings."""

    def result(self) -> State:
        """Return the combined movement (fp64) and start anew; a name that no client sent is absent."""


def pieces_of(summed: Any) -> Iterator[dict[str, Any]]:
    """Return ``pieces`` of an aggregation, or of an algorithm; its ``partial`` in one piece if it has no such method."""
    pieces = getattr(summed, "pieces", None)
    return pieces() if pieces else iter([summed.partial()])


class WeightedSum(Aggregation):
    """``scale * sum(w_m * delta_m) / divisor``, tensor by tensor over the clients that sent it.

    Each product, the sum of the products and the sum of the weights are correctly rounded to fp64.

    Args:
        divide_by: ``weight`` (sum of the weights), ``count`` (number of updates) or ``one``.
        scale: a constant factor, such as the number of clients; or one for each tensor, by name, of all that are sent.

    Examples:
        >>> import torch
        >>> mean, elsewhere = WeightedSum("weight"), WeightedSum("weight")
        >>> mean.add(Update("a", {"w": torch.tensor([1.0])}, weight=1.0))
        >>> elsewhere.add(Update("b", {"w": torch.tensor([4.0])}, weight=2.0))
        >>> mean.merge(elsewhere.partial())
        >>> mean.result()["w"].item()
        3.0
    """

    def __init__(
        self, divide_by: Literal["weight", "count", "one"], scale: float | Mapping[str, float] = 1.0
    ) -> None:
        if divide_by not in ("weight", "count", "one"):
            raise ValueError(f"WeightedSum.divide_by={divide_by!r} must be 'weight', 'count' or 'one'")
        self.divide_by = divide_by
        self.scale = scale
        self.sums = ExactSums()
        # By digests: from each of many processes, names of hundreds of tensors would be more than the sums.
        self._divisors = defaultdict[str, Fraction](Fraction)

    def add(self, update: Update) -> None:
        """Add ``weight * movement``; raise ValueError if the weight is not finite."""
        if not math.isfinite(update.weight):
            raise ValueError(
                f"the weight {update.weight} of client {update.client_id} is not finite: lower the lr"
            )
        self.sums.add(update.movement, update.weight)
        weight = update.weight if self.divide_by == "weight" else 1.0
        self._divisors[digest_of(tuple(update.movement))] += Fraction(weight)

    def partial(self) -> dict[str, Any]:
        """Return the sums of products and of weights (a numerator and a denominator each), and start anew."""
        divisors = [(names, number.as_integer_ratio()) for names, number in self._divisors.items()]
        self._divisors.clear()
        return {"sums": self.sums.partial(), "divisors": divisors}

    def merge(self, partial: Mapping[str, Any]) -> None:
        self.sums.merge(partial["sums"])
        for names, ratio in partial["divisors"]:
            self._divisors[names] += Fraction(*ratio)

    def result(self) -> State:
        known = {digest_of(names): names for names in self.sums.names()}
        total, divisors = self.sums.result(), defaultdict[str, Fraction](Fraction)
        for names, number in self._divisors.items():
            for name in known[names]:
                divisors[name] += number
        for name, value in total.items():
            scale = self.scale[name] if isinstance(self.scale, Mapping) else self.scale
            value.mul_(scale / (1.0 if self.divide_by == "one" else float(divisors[name]) or 1.0))
        self._divisors.clear()
        return total


Weighting = Literal["unbiased", "normalized", "uniform"]


FURTHER_HOOKS = (
    "send",
    "aggregation",
    "check_settings",
    "prepare_round",
    "start_round",
    "partial",
    "merge",
    "uploaded",
    "tell",
    "hear",
)
"""Methods of `Sends`, `Aggregates`, `ChecksSettings`, `PreparesRounds`, `StartsRounds`, `MergesVisits`, `RebuildsUploads`
and `TellsClients`."""


class Algorithm(Checked):
    """Hooks that the federated loop calls in each round; override what differs from FedAvg.

    Hooks of the server, in the order of a round: ``plan``; ``finish_visit`` for each visit; ``finish_round``. Hooks of a
    client, in each of its visits: ``start_visit``, ``adjust_gradients``, ``reply``. Values of one visit are kept in its
    `Visiting`, never in attributes of the algorithm, as several visits may be under way. Some algorithms also have methods
    of ``FURTHER_HOOKS``, each declared in a Protocol.

    Before a round, the loop of a run with devices calls `Sends`, ``start_visit`` and ``reply`` on meta tensors, to know how
    many bytes each client will send (`predict_payloads`). These three hooks depend on names and shapes, not on values.

    Args:
        weighting: with M clients, A of them sampled, and ``p_m`` a client's share of all examples, ``unbiased``:
            ``M / A * sum(p_m * delta_m)``, the mean over all clients in expectation (FedBis, eq. 8); ``normalized``:
            ``sum(p_m * delta_m) / sum(p_m)`` over the sampled; ``uniform``: the plain mean over the sampled.

    Raises:
        ValueError: another weighting.
    """

    def __init__(self, weighting: Weighting = "unbiased") -> None:
        if weighting not in ("unbiased", "normalized", "uniform"):
            raise ValueError(f"weighting={weighting!r} is not one of unbiased, normalized, uniform")
        self.weighting = weighting

    # The server

    def check(self, federation: Federation) -> None:
        """Raise ValueError, before the first round, for a run that the algorithm cannot work with."""
        refuse_several_adapters(federation.module, type(self).__name__)

    def plan(self, round_idx: int, cohort: Sequence[Client], num_batches: NumBatches) -> list[Visit]:
        """Return the visits of a round in the order of their training: by default one for each client.

        Visits of one client follow each other. It is also called once before `check`, with all clients, so that
        Lightning has a training loader as long as the longest visit; that plan is not trained.
        """
        return [Visit(client.id, num_batches(client.id)) for client in cohort]

    def finish_visit(self, visiting: Visiting, movement: State, work: Work) -> Update | None:
        """Return the server's addend, given the movement (reply minus received) that reached it; None for nothing."""
        client = visiting.client
        return Update(client.id, movement, 1.0 if self.weighting == "uniform" else client.share)  # p_m

    def finish_round(self, movement: State) -> State:
        """Return the part of the combined movement for the server's optimizer: all but the algorithm's own tensors."""
        return movement

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs: tensors and plain values only.

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
        """Return the visit under way, with the client's start parameters: by default those it received."""
        return Visiting(visit, client, received, start=received)

    def adjust_gradients(
        self, visiting: Visiting, parameters: Mapping[str, Tensor], gradients: dict[str, Tensor]
    ) -> None:
        """Change gradients in place before an optimizer step, after unscaling and before clipping.

        With several optimizers, each step gets its optimizer's parameters. Where an optimizer evaluates its closure several
        times in a step, as LBFGS does, gradients are changed at each evaluation.

        Args:
            visiting: the client's visit.
            parameters: the parameters as they are, by name; not to be changed.
            gradients: those that have one, by name. A tensor put under the name of another parameter becomes its gradient. A
                parameter whose gradient is taken out of the dictionary is left out of the step: neither momentum nor weight
                decay moves it. With clients side by side all of a group have to leave out the same ones. In a forward-only
                visit these are estimates, and the hook is called for one parameter at a time.
        """

    def reply(self, visiting: Visiting, trained: State, work: Work) -> State:
        """Return the tensors that the client sends back: by default all that it trained.

        A tensor that it did not receive, such as one of the algorithm's own, reaches the server as it is.

        A client left out of the round because its training diverged replies as if it had not moved, and that reply is thrown
        away.
        """
        return trained


@runtime_checkable
class Sends(Protocol):
    """Algorithm that sends something else than the global state."""

    def send(self, visit: Visit, client: Client, state: State) -> State | None:
        """Return what goes down to the client: a part of the global state, or tensors of the algorithm's own beside it.

        None in a further visit of the client in the round sends nothing: the client still has the tensors that it received.
        """


@runtime_checkable
class Aggregates(Protocol):
    """Algorithm that combines updates in its own way."""

    def aggregation(self, num_clients: int) -> Aggregation:
        """Return a fresh aggregation for one round of a federation of ``num_clients``."""


def message_to(algorithm: Algorithm, visit: Visit, client: Client, state: State) -> State | None:
    """Return what goes down to the client, by default the global state."""
    return algorithm.send(visit, client, state) if isinstance(algorithm, Sends) else state


def aggregation_of(algorithm: Algorithm, num_clients: int) -> Aggregation:
    """Return a fresh aggregation for one round, by default `weighted_sum`."""
    if isinstance(algorithm, Aggregates):
        return algorithm.aggregation(num_clients)
    return weighted_sum(algorithm.weighting, num_clients)


def weighted_sum(weighting: Weighting, num_clients: int) -> WeightedSum:
    """Return the sum of the sampled clients' movements, weighted over a federation of ``num_clients``."""
    if weighting == "unbiased":
        return WeightedSum("count", scale=num_clients)  # FedBis, eq. 8: M / A
    return WeightedSum("weight")


def has_own(algorithm: Algorithm, hook: str) -> bool:
    """Return whether an algorithm has a hook that is not that of FedAvg."""
    return getattr(type(algorithm), hook, None) is not getattr(Algorithm, hook, None)


def changes_gradients(algorithm: Algorithm) -> str | None:
    """Return the name of an algorithm that changes gradients; None for one that leaves them alone."""
    return type(algorithm).__name__ if has_own(algorithm, "adjust_gradients") else None


HOOKS_OF_LOCAL = ("check", "start_visit", "adjust_gradients")
"""Hooks that a local algorithm inside of another one may have."""


class WithLocal(Algorithm, ABC):
    """Base class of algorithms with a second algorithm, such as FedProx, for the gradients of their visits.

    Args:
        weighting: of the clients, as for `Algorithm`.
        local: algorithm that changes the gradients of a visit; None changes nothing. Its weighting plays no part.

    Raises:
        ValueError: ``local`` does more than change gradients.
    """

    gradients_alone = ""
    """Reason why the second algorithm may change nothing else, for the error."""

    def __init__(self, weighting: Weighting = "unbiased", local: Algorithm | None = None) -> None:
        super().__init__(weighting)
        self.local = local or Algorithm()  # changes no gradient
        for name in [*vars(Algorithm), *FURTHER_HOOKS]:
            if not name.startswith("_") and name not in HOOKS_OF_LOCAL and has_own(self.local, name):
                raise ValueError(
                    f"local={type(local).__name__} changes {name}: inside {type(self).__name__} a local algorithm may "
                    f"change gradients alone (as FedProx does). {self.gradients_alone}".rstrip()
                )

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
