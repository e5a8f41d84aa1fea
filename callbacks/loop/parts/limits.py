"""Limits of one client's effect on a round: ``federated.limits``.

A weighted mean has no bound: one client that claims many examples decides the round, and one huge update replaces
the model. Two limits hold without a look at any client's rows. Both compare a client with the others of its round:

    weight of a client     at most ``share`` of the sum of the round's weights
    norm of an update      at most ``norm`` times the median norm of the round, else it is scaled down to that

The second is norm clipping with a threshold that follows the round (Sun et al., "Can You Really Backdoor Federated
Learning?", 2019, https://arxiv.org/abs/1911.07963, section 4, has a fixed one). A run that enforces the limits holds the
round's updates until all have arrived; one that only warns holds two numbers each.

A client below both limits counts in full, so several liars together need a robust aggregation
(`fedlight.federation.aggregation`). Control variates of `Scaffold` are summed apart from the updates and are not limited,
nor are updates of `PrivateMean`, which clips them itself.
"""

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median_low
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_info

from fedlight.callbacks.loop.parts.part import Part
from fedlight.callbacks.loop.round_table import Record
from fedlight.callbacks.loop.run import Run
from fedlight.callbacks.loop.visits.round import OpenRound
from fedlight.devices.outcomes import CAPPED, CLIPPED, LARGE_NORM, LARGE_SHARE, LEFT_OUT, TOO_FEW
from fedlight.federation.aggregation import KeepsUpdates
from fedlight.federation.algorithm import Aggregation, Algorithm, pieces_of
from fedlight.federation.byzantine.whole_updates import FLTrust
from fedlight.federation.client import State, Update
from fedlight.federation.exact_sum import digest_of
from fedlight.federation.privacy import Private
from fedlight.support.checks import Checked, refuse_below

logger = logging.getLogger("fedlight")
DAY_SECONDS = 86_400
DONE = {
    CAPPED: "its weight is lowered to that",
    CLIPPED: "it is scaled down to the limit",
    LEFT_OUT: "it is left out",
    **dict.fromkeys((LARGE_NORM, LARGE_SHARE), "it counts as it is, and would not in a deployment"),
}
"""Reason -> what has happened."""


class Limits(Checked):
    """Settings ``federated.limits``: bounds of one client's part in a round, and of rounds without any client.

    Args:
        share: largest share of a round's weights that one client has, in (0, 1]; None: any. In a round of n clients at least
            ``2 / n`` is allowed: a smaller share would make the weights of few clients equal.
        norm: largest L2 norm of an update, over the median of the round, at least 1; None: any. All tensors count together,
            and the median is over updates of the same number of elements.
        action: treatment of a larger update: ``clip`` scales it down to the bound, ``leave_out`` drops it.
        enforce: true holds the limits; false names clients over them in ``visits.csv`` and in one warning; None: true in a
            deployment, where clients may lie, and false in the emulator.
        empty_rounds: rounds in a row without a client that took part, after which the run stops; None: it never does.

    Raises:
        ValueError: a value is out of its range.
    """

    def __init__(
        self,
        share: float | None = 0.3,
        norm: float | None = 3.0,
        action: Literal["clip", "leave_out"] = "clip",
        enforce: bool | None = None,
        empty_rounds: int | None = 5,
    ) -> None:
        if share is not None and not 0 < share <= 1:
            raise ValueError(f"share={share} must be in (0, 1], or null for any")
        if norm is not None and not 1 <= norm < math.inf:
            raise ValueError(f"norm={norm} must be at least 1, or null for any")
        refuse_below(1, empty_rounds=empty_rounds)
        self.share, self.norm, self.action = share, norm, action
        self.enforce, self.empty_rounds = enforce, empty_rounds

    def largest_share(self, clients: int) -> float:
        """Return the largest share of a client in a round of so many clients.

        Examples:
            >>> [Limits(share=0.3).largest_share(clients) for clients in (2, 4, 10)]
            [1.0, 0.5, 0.3]
        """
        return 1.0 if self.share is None else max(self.share, min(1.0, 2 / clients))

    def believed(self, claimed: Mapping[str, int], clients_per_round: int) -> dict[str, int]:
        """Return the numbers of examples that count in a deployment, given those that the clients claim.

        A claim is cut to the number that gives the client the largest share of a round whose other clients have the median.
        Rounds of one or two clients have the bound of three.

        Examples:
            >>> Limits(share=0.5).believed({"a": 100, "b": 80, "c": 120, "d": 10**9}, clients_per_round=4)
            {'a': 100, 'b': 80, 'c': 120, 'd': 300}
        """
        # Before the round: a share of all examples would be that of the liar alone.
        clients = max(3, clients_per_round)
        share = self.largest_share(clients)
        if share == 1 or not claimed:
            return dict(claimed)
        # most / (most + (clients - 1) * median) = share
        most = int(median_low(claimed.values()) * (clients - 1) * share / (1 - share))
        return {name: min(number, most) for name, number in claimed.items()}


class Arrived(NamedTuple):
    """Update of a round as it is compared with the others: a digest of its names, numbers, L2 norm and weight."""

    client_id: str
    names: str
    numbers: int
    norm: float
    weight: float


def capped(weights: Mapping[str, float], share: float) -> dict[str, float]:
    """Return the weights with none above ``share`` of their new sum; the order of the clients changes no bit.

    Args:
        weights: client -> weight, at least 0.
        share: largest share, above one over the number of weights.

    Examples:
        >>> capped({"a": 1.0, "b": 1.0, "c": 2.0, "d": 100.0}, share=0.5)
        {'a': 1.0, 'b': 1.0, 'c': 2.0, 'd': 4.0}
    """
    falling = sorted(weights.values(), reverse=True)
    for over, largest in enumerate(falling):  # so many are above the cap
        # The cap m solves m = share * (over * m + the rest); fsum does not depend on the order.
        most = share / (1 - over * share) * math.fsum(falling[over:])
        if largest <= most:
            return {name: min(weight, most) for name, weight in weights.items()} if over else dict(weights)
    return dict(weights)


class LimitedRounds(Part):
    """Limits in the rounds of a run."""

    def __init__(self, limits: Limits, deployed: bool) -> None:
        self.limits = limits
        self.enforced = deployed if limits.enforce is None else limits.enforce
        self._said: set[str] = set()
        self._round: LimitedRound | None = None
        self._empty: list[Counter[str]] = []
        self._empty_since = 0.0
        self.claims: dict[str, int] = {}

    def say_what_is_not_limited(self, algorithm: Algorithm, secure: bool) -> None:
        """Name the limits that a deployment cannot hold."""
        if self.enforced and secure:
            rank_zero_info(
                "secure-aggregation: the server sees no single update, so limits.norm is not held; the numbers of "
                "examples that clients claim are limited"
            )
        if self.enforced and hasattr(algorithm, "sums"):
            rank_zero_info(
                f"limits do not hold for what {type(algorithm).__name__} adds up beside the updates"
            )

    def attach(self, run: Run) -> None:
        """Raise ValueError if a client that the aggregation needs will be missing in some rounds."""
        if isinstance(run.aggregation, FLTrust):
            everybody = run.planned.num_asked >= len(run.clients)
            run.aggregation.check([*run.clients] if everybody else [])

    def start_round(self, run: Run) -> None:
        """Raise ValueError for a round whose clients its aggregation has no meaning for, before they train."""
        cohort = run.planned.cohort
        # Where some are absent it is no fault of the settings: `settle` leaves the others out.
        if isinstance(run.aggregation, KeepsUpdates) and len(cohort) >= run.planned.num_asked:
            run.aggregation.check([client.id for client in cohort])

    def aggregation(self, run: Run, inner: Aggregation, num_clients: int) -> Aggregation:
        """Return the aggregation of the round that begins, with limits before it unless it is private."""
        both = inner, run.aggregation  # the one may be around the other
        # Those that count clients alike have no weights to limit.
        weighs = self.limits.share is not None and not any(isinstance(each, KeepsUpdates) for each in both)
        # A private clipping threshold must not follow the data.
        is_private = any(isinstance(each, Private) for each in both)
        self._round = None if is_private else LimitedRound(self, inner, weighs, run.norm)
        return self._round or inner

    def end_visits(self, run: Run, round: OpenRound) -> None:
        """Compare the round's updates, and write a reason into the rows of each client over a limit."""
        if self._round is None:
            return
        rows, round_idx = run.records, run.round_idx
        reasons = self._round.settle(run.gather)
        if self._round.unused:
            logger.warning(f"round {round_idx + 1}: updates are left out: {self._round.unused}")
        for name in self.claims.keys() & {str(row["client"]) for row in rows if not row["reason"]}:
            reasons.setdefault(name, set()).add(CAPPED)
        for name in sorted(reasons):
            for reason in sorted(reasons[name] - {TOO_FEW}):
                self._say(round_idx, name, reason)
        for row in rows:
            row["reason"] = row["reason"] or "+".join(sorted(reasons.get(str(row["client"]), ())))

    def believe(self, claimed: Mapping[str, int], clients_per_round: int) -> dict[str, int]:
        """Return `Limits.believed` where limits are enforced, and note clients that claim more."""
        if not self.enforced:
            return dict(claimed)
        believed = self.limits.believed(claimed, clients_per_round)
        self.claims = {name: number for name, number in claimed.items() if number > believed[name]}
        return believed

    def after_round(self, run: Run, metrics: Mapping[str, float]) -> None:
        self.count(run.round_idx, run.records, metrics, run.devices.round_end_seconds)

    def count(self, done: int, rows: Sequence[Record], metrics: Mapping[str, float], seconds: float) -> None:
        """Count consecutive rounds without a client that took part; those of absent devices count once a day is over.

        Args:
            done: number of rounds that are over.
            rows: rows of the last one.
            metrics: its metrics, among them ``clients``, those that took part.
            seconds: its end on the devices' clock; 0 without one.

        Raises:
            ValueError: it is the last of ``empty_rounds`` rounds in a row without anybody.
        """
        if metrics["clients"] or self.limits.empty_rounds is None:
            self._empty = []
            return
        self._empty_since = self._empty_since if self._empty else seconds
        self._empty.append(Counter(str(row["reason"]) for row in rows))
        number, causes = len(self._empty), sum(self._empty, Counter[str]())
        # Emulated devices that are absent for a night come back.
        waits = "absent" in causes and 0 < seconds < self._empty_since + DAY_SECONDS
        if number < self.limits.empty_rounds or waits:
            return
        reasons = ", ".join(f"{reason} ({times})" for reason, times in causes.most_common(8))
        raise ValueError(
            f"{number} rounds in a row, the last of them round {done}, had no client that took part: "
            f"{reasons or 'none had an example to train on'}. The model is that of round {done - number}, and the run goes "
            "on from its newest checkpoint once the reason is gone: give late clients more time (the deadline), devices "
            "that are out of memory a smaller batch, and start nodes that are away. To go on all the same, set "
            "limits.empty_rounds to more rounds, or to null"
        )

    def _say(self, round_idx: int, client_id: str, reason: str) -> None:
        """Warn once a run for each reason, and in a deployment for each client."""
        key = f"{reason} {client_id}" if self.enforced else reason
        if key in self._said:
            return
        self._said.add(key)
        assert self._round is not None
        if reason in (CAPPED, LARGE_SHARE):
            claim = f", which claims {self.claims[client_id]:,} examples," if client_id in self.claims else ""
            what = f"client {client_id}{claim} has more than a share {self._round.share:.2g} of the weights"
            remedy = f"raise limits.share={self.limits.share}, or weight clients alike"
        else:
            times = self._round.times[client_id]
            what = f"the update of client {client_id} has {times:.3g} times the median norm of the round"
            remedy = f"lower the learning rate if it diverges, or raise limits.norm={self.limits.norm}"
        logger.warning(
            f"round {round_idx + 1}: {what}; {DONE[reason]}. Further ones: visits.csv. If it is honest, {remedy}"
        )


def norm_of(state: State) -> float:
    """Return the L2 norm of all tensors together, in fp64."""
    norms = [torch.linalg.vector_norm(value.double()) for value in state.values() if value.numel()]
    return math.hypot(*(each.item() for each in norms))


class LimitedRound(Aggregation):
    """Aggregation of one round with limits before it.

    Attributes:
        times: client -> norm of its update over the median, of those over the limit.
        share: largest share of a client in the round.
        unused: reason why updates are left out as `TOO_FEW`, if some are.
    """

    def __init__(
        self,
        run: LimitedRounds,
        inner: Aggregation,
        weighs: bool,
        norm: Callable[[State], float] | None = None,
    ) -> None:
        self._limits, self._enforced, self._inner = run.limits, run.enforced, inner
        self._norm = norm or norm_of
        self.keeps_factors = getattr(inner, "keeps_factors", False)
        self._weighs = weighs
        self._arrived: list[Arrived] = []
        self._held: list[Update] = []
        self._medians: dict[int, float] = {}
        self._lowered: dict[tuple[str, str], float] = {}
        self.times: dict[str, float] = {}
        self.share, self.unused = 1.0, ""

    @property
    def sums(self) -> Any:
        """Exact sums of the aggregation behind the limits, if it has them."""
        return getattr(self._inner, "sums", None)

    def add(self, update: Update) -> None:
        """Measure an update; hold it where limits are enforced."""
        tensors = update.movement.values()
        norm = self._norm(update.movement) if self._limits.norm is not None else 0.0
        numbers = sum(value.numel() for value in tensors)
        self._arrived.append(
            Arrived(update.client_id, digest_of(tuple(sorted(update.movement))), numbers, norm, update.weight)
        )
        # All have to arrive first; the second kind would hold them as well.
        holds = self._enforced or isinstance(self._inner, KeepsUpdates)
        self._held.append(update) if holds else self._inner.add(update)

    def settle(self, gather: Callable[[Any, str], list[Any]]) -> dict[str, set[str]]:
        """Compare the updates of all processes, pass on those held, and return client -> reasons of those over a limit."""
        gathered = gather([[*update] for update in self._arrived], "limits")
        everything = [Arrived(*update) for of_process in gathered for update in of_process]
        if self._limits.norm is not None:
            self._compare_norms(everything)
        unused = self._unused([each for each in everything if not self._is_left_out(each)])
        if self._weighs:  # the shares are of those that count
            self._compare_weights([each for each in everything if not self._is_left_out(each)])
        for arrived, update in zip(self._arrived, self._held):  # noqa: B905  nothing is held without enforcement
            if self._is_left_out(arrived) or arrived.names in unused:
                continue
            if self._enforced and (scale := self._scale(arrived)) < 1:
                update = replace(update, movement={n: value * scale for n, value in update.movement.items()})
            lowered = self._lowered.get((arrived.client_id, arrived.names), 1.0)
            self._inner.add(update if lowered == 1 else replace(update, weight=update.weight * lowered))
        self._arrived, self._held = [], []
        large = LARGE_NORM if not self._enforced else CLIPPED if self._limits.action == "clip" else LEFT_OUT
        heavy = CAPPED if self._enforced else LARGE_SHARE
        reasons = {name: {large} for name in self.times}
        for name, _ in self._lowered:
            reasons.setdefault(name, set()).add(heavy)
        return reasons | {each.client_id: {TOO_FEW} for each in everything if each.names in unused}

    def _unused(self, counted: Sequence[Arrived]) -> set[str]:
        """Return the names that the aggregation has no meaning for, as too few clients have sent them; note why."""
        unused, clients = set[str](), defaultdict[str, list[str]](list)
        for arrived in sorted(counted) if isinstance(self._inner, KeepsUpdates) else ():
            clients[arrived.names].append(arrived.client_id)
        for names, senders in clients.items():
            try:
                self._inner.check(senders)  # type: ignore[attr-defined]
            except ValueError as error:  # some may have dropped out, which ends no run
                self.unused = str(error)
                unused.add(names)
        return unused

    def _compare_norms(self, everything: Sequence[Arrived]) -> None:
        norms = defaultdict[int, list[float]](list)
        for arrived in everything:
            norms[arrived.numbers].append(arrived.norm)
        # The lower one of the middle two: a large update among two does not raise it.
        self._medians = {numbers: median_low(each) for numbers, each in norms.items()}
        for arrived in everything:
            if self._scale(arrived) < 1:
                median = self._medians[arrived.numbers]
                times = arrived.norm / median if median else math.inf
                self.times[arrived.client_id] = max(times, self.times.get(arrived.client_id, 0.0))

    def _scale(self, arrived: Arrived) -> float:
        """Return the factor in [0, 1] that brings an update down to the limit."""
        if self._limits.norm is None:
            return 1.0
        most = self._medians[arrived.numbers] * self._limits.norm
        # The last bits of a norm depend on the processor; those that fp32 keeps hardly ever do.
        return 1.0 if arrived.norm <= most else float(torch.tensor(most / arrived.norm, dtype=torch.float32))

    def _is_left_out(self, arrived: Arrived) -> bool:
        return self._enforced and self._limits.action == "leave_out" and self._scale(arrived) < 1

    def _compare_weights(self, everything: Sequence[Arrived]) -> None:
        """Note the factors that lower weights; each tensor is averaged over the clients that sent it."""
        weights = defaultdict[str, dict[str, float]](dict)
        for arrived in everything:
            if arrived.weight > 0:
                of_names = weights[arrived.names]
                of_names[arrived.client_id] = of_names.get(arrived.client_id, 0.0) + arrived.weight
        for names, of_names in weights.items():
            self.share = self._limits.largest_share(len(of_names))
            for name, weight in capped(of_names, self.share).items():
                if weight < of_names[name]:
                    self._lowered[name, names] = weight / of_names[name]

    def partial(self) -> dict[str, Any]:
        return self._inner.partial()

    def pieces(self) -> Iterator[dict[str, Any]]:
        return pieces_of(self._inner)

    def merge(self, partial: Mapping[str, Any]) -> None:
        self._inner.merge(partial)

    def result(self) -> State:
        return self._inner.result()
