"""Privacy account of a run: epsilon after each round, of a private aggregation, channel or part, and its end at a budget."""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

from fedlight.callbacks.loop.parts.part import Part
from fedlight.callbacks.loop.run import Run
from fedlight.callbacks.loop.visits.round import OpenRound
from fedlight.devices.outcomes import took_part
from fedlight.federation.algorithm import Aggregation
from fedlight.federation.algorithms.fedavg import FedAvg
from fedlight.federation.algorithms.fedprox import FedProx
from fedlight.federation.client import Channel, State
from fedlight.federation.privacy import ClipAndNoise, Private, Rounds, gaussian_epsilon

logger = logging.getLogger("fedlight")

SUMS_ALONE = (FedAvg, FedProx)
"""Algorithms whose server needs the sum of the updates and nothing else of a round, which says nothing of derived ones."""


class PrivacyAccount(Part):
    """Privacy account of a run with a private aggregation or channel, or with a private part, which protects examples.

    Attributes:
        rounds: (clients sampled, number of clients) -> number of such rounds; epsilon depends on nothing else.
        asked: client -> number of rounds that asked it; epsilon towards the server follows from the largest, and so does
            that of clients in turn.
        recent: cohorts of the last rounds, newest first, whose clients may not take part yet.
        passes: client -> number of passes over its examples; epsilon of an example follows from the largest.
        noise: noise that was found for an epsilon, by the end of its names in the log; it stays when a run is resumed.

    Raises:
        ModuleNotFoundError: something is private and the accountant is not installed.
    """

    def __init__(
        self, aggregation: Aggregation | None, channel: Channel, further: Sequence[Part] = ()
    ) -> None:
        self.rounds: Counter[tuple[int, int]] = Counter()
        self.asked: Counter[str] = Counter()
        self.passes: Counter[str] = Counter()
        self.recent: list[list[str]] = []
        self.noise: dict[str, float] = {}
        noised: Any = getattr(channel, "private", None)
        self._shared_by = getattr(noised, "shared_by", 1)
        self._alone = [
            aggregation is None,
            *(type(codec) is ClipAndNoise for codec in getattr(channel, "up_codecs", [])),
            *(type(part).aggregation is Part.aggregation for part in further),
        ]
        parts: dict[str, object] = {"": aggregation, "_local" if self._shared_by == 1 else "_sum": noised}
        parts["_example"] = next((part for part in further if isinstance(part, Private)), None)
        self._parts = {end: part for end, part in parts.items() if isinstance(part, Private)}
        self._by_client = {end for end, part in self._parts.items() if end or part.bands}
        self._bands = getattr(aggregation, "bands", None) or 1
        for part in self._parts.values():
            gaussian_epsilon(1.0, part.delta, times=0)  # asks whether the accountant is installed

    @property
    def is_private(self) -> bool:
        """Whether the aggregation, the channel or a part promises differential privacy."""
        return bool(self._parts)

    def meet(self, run: Run) -> None:
        """Raise ValueError unless delta < 1 / clients: else to reveal all of one would be private; a part checks its own."""
        for end, part in self._parts.items():
            if end != "_example":
                part.check_delta(len(run.clients), "clients", "all that one of them holds")

    def _refuse_other_sums(self, run: Run) -> None:
        asked, uniform = run.planned.num_asked, getattr(run.algorithm, "weighting", "") == "uniform"
        one_sum = type(run.algorithm) in SUMS_ALONE and all(self._alone)
        enforced = any(getattr(getattr(part, "limits", None), "enforce", None) for part in run.parts)
        for holds, reason in (
            (
                one_sum,
                "needs FedAvg or FedProx, no aggregation, no other codec and no part that changes updates: the noise is "
                "that of one sum",
            ),
            (
                not enforced,
                "needs limits.enforce left out: a limit on one update changes the noise of the sum",
            ),
            (uniform, "needs algorithm.weighting=uniform: clip_norm bounds what a client adds to the sum"),
            (asked >= self._shared_by, f"needs as many clients in a round, and {asked} are asked"),
        ):
            if not holds:
                raise ValueError(f"ClipAndNoise with shared_by={self._shared_by} {reason}")

    def attach(self, run: Run) -> None:
        """Find the noise for a budget, if no checkpoint has it, and end a run that has spent its budget.

        Raises:
            ValueError: clients share noise, and there is no sum of enough of them with equal weights; or a client's turns
                follow each other too closely for ``bands``.
        """
        if self._shared_by > 1:
            self._refuse_other_sums(run)
        between = len(run.clients) // run.planned.num_asked
        if self._bands > between:
            raise ValueError(
                f"PrivateMean: bands={self._bands} needs as many rounds from one of a client to its next, and with "
                f"{run.planned.num_asked} of {len(run.clients):,} clients in a round there are {between}: set "
                f"bands={between} or less, or a smaller federated.clients_per_round"
            )
        for end, part in self._parts.items():
            if discard := getattr(part, "partial", None):  # of an aggregation
                discard()  # a round that was broken off has left updates
            if not self.rounds:  # they may come from another run
                part.norm, part.earlier = part.clip_norm, {}
                self.noise.pop(end, None)
            if part.epsilon is None:
                continue
            if end not in self.noise:
                self.noise[end] = part.noise_for(self._counted(end, run, range(run.num_rounds)))
                rank_zero_info(
                    f"{type(part).__name__}: noise_multiplier={self.noise[end]:.5g} keeps epsilon={part.epsilon:g} at "
                    f"delta={part.delta:g} for {run.num_rounds} rounds of {run.planned.num_asked} of {len(run.clients):,} "
                    "clients"
                )
            part.noise = self.noise[end]
        self._stop_at_budget(run)

    def start_round(self, run: Run) -> None:
        """Raise ValueError for a round that would exceed the budget, or asks a client whose turn it cannot be."""
        if reason := self._exceeded(run):  # the trainer goes on, because of min_epochs
            raise ValueError(f"{reason}: set trainer.min_epochs={run.round_idx} or less")
        resting = {name for cohort in self.recent for name in cohort}
        if resting and (again := resting & self._uses("", run, run.round_idx).keys()):
            raise ValueError(
                f"PrivateMean: round {run.round_idx + 1} asks client {min(again)!r} again before bands={self._bands} rounds "
                "are over, because clients have come or gone: go on from the last checkpoint with the clients of its run"
            )

    def finish_round(self, run: Run, round: OpenRound, movement: State) -> dict[str, float]:
        if "_example" in self._parts:
            self.passes.update(self._uses("_example", run, run.round_idx))
        # Dropouts count, because they were sampled.
        asked = [client.id for client in run.planned.asked(run.round_idx)]
        spent = self.after(asked, len(run.clients))
        there = len({row["client"] for row in run.records if took_part(str(row["reason"]))})
        if there < self._shared_by > 1:
            movement.clear()  # nodes of a deployment do not unmask such a sum
            logger.warning(
                "ClipAndNoise: round %s had %s of the %s clients that share the noise, so it moves nothing",
                *(run.round_idx + 1, there, self._shared_by),
            )
        changing = {end: part for end, part in self._parts.items() if part.clip_quantile is not None}
        return spent | {f"clip_norm{end}": part.norm for end, part in changing.items()}

    def after_round(self, run: Run, metrics: Any) -> None:
        self._stop_at_budget(run)

    def after(self, asked: Sequence[str], clients: int) -> dict[str, float]:
        """Count a round that asked some of ``clients``, and return epsilon after it.

        Returns:
            ``epsilon`` and ``delta`` towards observers of the models, ``epsilon_local`` and ``delta_local`` towards the
                server, of the client that was asked most often, with ``_sum`` at the end where clients share their noise,
                ``epsilon_example`` and ``delta_example`` of an example of the client with the most passes; absent where
                nothing is private.
        """
        self.rounds[len(asked), clients] += 1
        if self._by_client - {"_example"}:
            self.asked.update(asked)
        self.recent = [[*asked], *self.recent][: self._bands - 1]
        spent: dict[str, float] = {}
        for end, part in self._parts.items():
            spent |= {f"epsilon{end}": part.spent(self._counted(end)), f"delta{end}": part.delta}
        return spent

    def _counted(self, end: str, run: Any = None, coming: Sequence[int] = ()) -> Rounds:
        """Return the rounds so far, and coming ones by their numbers, as an end's epsilon depends on them."""
        if end in self._by_client:
            uses = Counter(self.passes if end == "_example" else self.asked)
            for round_idx in coming:
                uses.update(self._uses(end, run, round_idx))
            return {(1, 1): max(uses.values(), default=0)}
        rounds = Counter(self.rounds)
        if coming:
            rounds[run.planned.num_asked, len(run.clients)] += len(coming)
        return rounds

    def _uses(self, end: str, run: Run, round_idx: int) -> Counter[str]:
        """Return client -> how often a round uses what an end protects."""
        if end == "_example":
            part: Any = self._parts[end]
            return Counter(part.passes(run, round_idx))
        return Counter(client.id for client in run.planned.asked(round_idx))

    def _exceeded(self, run: Run) -> str:
        """Return the reason why no further round may be trained; empty if one may."""
        for end, part in self._parts.items():
            if part.epsilon is None:
                continue
            if part.spent(self._counted(end, run, [run.round_idx])) > part.epsilon:
                return (
                    f"{type(part).__name__}: round {run.round_idx + 1} would exceed epsilon={part.epsilon:g}, of which "
                    f"{part.spent(self._counted(end)):.4g} is spent"
                )
        return ""

    def _stop_at_budget(self, run: Run) -> None:
        if run.round_idx < run.num_rounds and (reason := self._exceeded(run)):
            run.trainer.should_stop = True
            rank_zero_info(
                f"{reason}, so the training ends here: for {run.num_rounds} rounds start a new run, which adds more noise "
                "from its first round on, or one with a larger epsilon"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return counts, noise, clipping norms and what later noises depend on, for a checkpoint."""
        counts = {name: dict(getattr(self, name)) for name in ("rounds", "asked", "passes")}
        norms = {end: part.norm for end, part in self._parts.items()}
        earlier = {end: dict(part.earlier) for end, part in self._parts.items()}
        kept = {"recent": [*self.recent], "noise": dict(self.noise), "norms": norms, "earlier": earlier}
        return {**counts, **kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rounds, self.asked, self.passes = (
            Counter(state.get(name, {})) for name in ("rounds", "asked", "passes")
        )
        self.recent, self.noise = [*state.get("recent", [])], dict(state.get("noise", {}))
        for end, part in self._parts.items():
            part.norm = state.get("norms", {}).get(end, part.clip_norm)
            part.earlier = dict(state.get("earlier", {}).get(end, {}))
