"""Ways of assigning clients to the selectors of FedBiscuit, besides the paper's `GreedyGroups`.

Groups need not be of one size: `NearestGroups` are those of IFCA (Ghosh et al., "An Efficient Framework for Clustered
Federated Learning", NeurIPS 2020, https://arxiv.org/abs/2006.04088, Algorithm 1).

A client need not have one selector alone: with `SoftGroups` it has weights pi_m over the selectors, trains all of them and
predicts by their probabilities, mixed by pi_m. As in FedEM (Marfoq et al., "Federated Multi-Task Learning under a Mixture of
Distributions", NeurIPS 2021, https://arxiv.org/abs/2108.10252, Algorithm 1), every grouping takes one EM step on the
client's examples i; the first starts from uniform weights:

    E-step   q_i(u) ~ pi_m(u) * exp(-loss of i under u), of sum 1 over the selectors
    M-step   pi_m(u) = mean of q_i(u) over the examples

In a round a sampled client has a visit for each selector, and its movement of selector u counts by p_m * pi_m(u) instead of
p_m. Deviation: FedEM weights the losses of the examples by q_i(u) and adds up the clients' models by p_m; here a client is
weighted as a whole, so that any module can be trained.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment

from fedlight.federation.protocols import Federation, NamesGroups
from fedlight.support.checks import Checked

ByExample = Sequence[Mapping[str, np.ndarray]]
"""For each selector, client id -> its loss on each of the client's examples, ``(examples,)``."""


class Assignment(Checked, ABC):
    """Way of assigning clients to selectors at a grouping.

    Attributes:
        all_selectors: whether a client trains every selector in a round, not only the one that it is assigned to.
        weights: client id -> its weights over the selectors, which sum to 1; empty where each client has one selector.
    """

    all_selectors = False

    def __init__(self) -> None:
        self.weights: dict[str, list[float]] = {}

    def check_settings(self, federation: Federation) -> None:
        """Raise ValueError, before the module's model is loaded, for settings that do not suit the assignment."""

    def check(self, federation: Federation, num_selectors: int) -> None:
        """Raise ValueError, before the first round, for data that do not suit the assignment."""

    @abstractmethod
    def assign(self, losses: np.ndarray, by_example: ByExample, federation: Federation) -> np.ndarray:
        """Return the selector of each client, ``(clients,)``, given finite mean losses, ``(clients, selectors)``."""


class OptimalGroups(Assignment):
    """Groups of equal size and least total loss, exactly by `optimal`: equations 4 and 5 of FedBiscuit."""

    def assign(self, losses: np.ndarray, by_example: ByExample, federation: Federation) -> np.ndarray:
        return optimal(losses)


class NearestGroups(Assignment):
    """Groups of any size: each client has the selector of its least loss (IFCA)."""

    def assign(self, losses: np.ndarray, by_example: ByExample, federation: Federation) -> np.ndarray:
        _refuse_equal(losses, type(self).__name__)
        return _logged(nearest(losses), federation)


class SoftGroups(Assignment):
    """Weights of each client over all selectors (FedEM); it is assigned to that of its largest weight.

    A sampled client has U visits in a round, which ``visits.csv`` names by the selectors.
    """

    all_selectors = True

    def check_settings(self, federation: Federation) -> None:
        if federation.robust:
            raise ValueError(
                "SoftGroups weights the clients' movements of a selector, and aggregation counts all clients alike, so the "
                "selectors would become equal: take out aggregation, or set assignment=NearestGroups"
            )
        if getattr(federation.channel, "private", None):
            raise ValueError(
                "SoftGroups has a client send an update of each selector, and ClipAndNoise is accounted for one in a round: "
                "take ClipAndNoise out of the channel, or set assignment=NearestGroups"
            )

    def assign(self, losses: np.ndarray, by_example: ByExample, federation: Federation) -> np.ndarray:
        _refuse_equal(losses, type(self).__name__)
        uniform = [1 / len(by_example)] * len(by_example)  # before the first grouping
        before = {client: np.array(self.weights.get(client, uniform)) for client in federation.clients}
        # [examples, selectors] for each client
        examples = {client: np.stack([each[client] for each in by_example], axis=1) for client in before}
        self.weights = {client: em_step(before[client], examples[client]).tolist() for client in before}
        return _logged(np.array([*self.weights.values()]).argmax(axis=1), federation)


class KnownGroups(Assignment):
    """Groups that the data have in their column ``group``: a reference that no federation has.

    A client without a group has the selector of its least loss.
    """

    def check(self, federation: Federation, num_selectors: int) -> None:
        _known(federation, num_selectors)

    def assign(self, losses: np.ndarray, by_example: ByExample, federation: Federation) -> np.ndarray:
        known = _known(federation, losses.shape[1])
        pairs = zip(federation.clients, nearest(losses), strict=True)
        return np.array([known.get(client, near) for client, near in pairs])


def _known(federation: Federation, num_selectors: int) -> dict[str, int]:
    """Return client -> number of its known group; raise ValueError for data without groups, or with too many."""
    named = federation.data.client_groups if isinstance(federation.data, NamesGroups) else None
    # Whether the rows of clients that are tested alone are read by now must not number the other groups.
    known = {client: group for client, group in (named or {}).items() if client in federation.clients}
    if not known:
        raise ValueError(
            "KnownGroups needs groups of the clients: map columns.group to a column of the data, or set another assignment"
        )
    numbers = {group: number for number, group in enumerate(sorted(set(known.values())))}
    if len(numbers) > num_selectors:
        raise ValueError(
            f"KnownGroups: {len(numbers)} groups for {num_selectors} selectors: set model.num_adapters={len(numbers)}"
        )
    return {client: numbers[group] for client, group in known.items()}


def _refuse_equal(losses: np.ndarray, assignment: str) -> None:
    if (losses == losses[:, :1]).all():
        raise ValueError(
            f"all {losses.shape[1]} selectors are equal, so assignment={assignment} cannot tell them apart: set "
            "warmup_rounds to 1 or more, or start from selectors that differ"
        )


def _logged(groups: np.ndarray, federation: Federation) -> np.ndarray:
    """Log how many selectors are used, as groups may be empty, and all clients in one."""
    federation.log({"selectors_used": float(len({*groups.tolist()}))})
    return groups


def optimal(losses: np.ndarray) -> np.ndarray:
    """Return the assignment of least total loss whose group sizes differ by at most 1 (eq. 4 and 5).

    The cost matrix has a column for each place, so time and memory grow with the square of the clients: 10,000 take ten
    seconds and 1.6 GB, where ``greedy`` takes milliseconds.

    Args:
        losses: ``(clients, selectors)``, finite.
    """
    refuse_diverged(losses)
    num_clients, num_selectors = losses.shape
    fixed, rest = divmod(num_clients, num_selectors)
    if not rest:
        places = np.repeat(np.arange(num_selectors), fixed)
        return places[linear_sum_assignment(losses[:, places])[1]]
    # Of M = q U + r clients q go to each selector, and r of the selectors get one more.
    places = np.concatenate([np.repeat(np.arange(num_selectors), fixed), np.arange(num_selectors)])
    never = 1 + np.abs(losses).sum()  # above any total
    placeholders = np.zeros((num_selectors - rest, len(places)))  # they fill the surplus places
    placeholders[:, : num_selectors * fixed] = never
    return places[linear_sum_assignment(np.concatenate([losses[:, places], placeholders]))[1][:num_clients]]


def nearest(losses: np.ndarray) -> np.ndarray:
    """Return the selector of least loss for each client, the first of several; groups may have any size.

    Examples:
        >>> nearest(np.array([[0.1, 0.9], [0.2, 0.3], [0.0, 0.4], [0.3, 0.2]])).tolist()
        [0, 0, 0, 1]
    """
    refuse_diverged(losses)
    return losses.argmin(axis=1)


def em_step(weights: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """Return a client's weights over the selectors after a step of expectation maximization (FedEM, Algorithm 1).

    Args:
        weights: before the step, ``(selectors,)``, at least 0, summing to 1.
        losses: negative log-likelihoods, ``(examples, selectors)``, finite.

    Examples:
        >>> em_step(np.array([0.5, 0.5]), -np.log([[0.9, 0.1], [0.3, 0.6]])).round(4).tolist()  # 0.9 and 1 / 3
        [0.6167, 0.3833]
    """
    # In logarithms: a weight that has become 0 beside a loss that is larger by hundreds would give 0 / 0.
    with np.errstate(divide="ignore"):
        log_joint = np.log(weights) - losses
    # E-step
    likelihoods = np.exp(log_joint - log_joint.max(axis=1, keepdims=True))
    posteriors: np.ndarray = likelihoods / likelihoods.sum(axis=1, keepdims=True)
    return posteriors.mean(axis=0)  # M-step


def refuse_diverged(losses: np.ndarray) -> np.ndarray:
    """Return ``losses``; raise ValueError for one that is not finite."""
    if not np.isfinite(losses).all():
        client, selector = np.argwhere(~np.isfinite(losses))[0].tolist()
        raise ValueError(
            f"the loss of client {client} under selector {selector} is {losses[client, selector]}: lower the lr"
        )
    return losses


def scores_examples(algorithm: object) -> bool:
    """Return whether an algorithm assigns clients by the losses of single examples, and not by their means alone."""
    return isinstance(getattr(algorithm, "assignment", None), SoftGroups)
