"""FedBiscuit: several binary selectors, each trained by a balanced group of clients that agree.

F. Wu et al., "Towards Federated RLHF with Aggregated Client Preference for LLMs", ICLR 2025,
https://arxiv.org/abs/2407.03038, Algorithm 1. Selectors are adapters on one base, started identically.

* Warm-up: each selector in turn is trained by the whole federation for some rounds, as FedBis does (eq. 8).
* Then, every tau rounds, each client scores every selector on its validation pairs and is assigned to one
  (step 2.1, `GreedyGroups`; `assignments` has other ways); a sampled client trains the selector of its group.

Eq. 6 is used in movement form: ``w_u <- w_u + sum over the sampled members of p_m * delta_m``. A selector without
sampled members does not move. Deviation: other weightings can be chosen, since with p_m alone a selector moves by
a small part of its members' mean movement: with U = 3, where 5 of 53 equal clients are sampled, 5 / 53 / 3, about 0.03.

On devices, a grouping is done for all clients, present or not, on the base of the server. It takes no time on the virtual
clock and no energy; its bytes are counted, as ``fed/grouping_bytes_down`` and ``fed/grouping_bytes_up``.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from torch import zeros

from fedlight.federation.algorithm import Aggregation, Algorithm, WeightedSum, WithLocal, weighted_sum
from fedlight.federation.algorithms.assignments import Assignment, ByExample, refuse_diverged
from fedlight.federation.client import Client, State, Update, Visit, Visiting, Work, serialized_bytes
from fedlight.federation.protocols import Federation, HoldsAdapters, LossesOn, NumBatches, adapter_numbers
from fedlight.support.checks import refuse_below


class FedBiscuit(WithLocal):
    """Warm-up of each selector in turn, then grouping and training by group.

    Args:
        warmup_rounds: T, rounds of warm-up for each selector, at least 0.
        regroup_every: tau, rounds between groupings, at least 1. In a deployment a client that is new begins one as well.
        assignment: way of assigning clients to selectors; `GreedyGroups`, the paper's, if not given.
        weighting: after the warm-up; ``paper``: p_m alone (eq. 6); ``unbiased``: the mean over the group in
            expectation; ``normalized``: weights sum to 1 over the group's sampled members; ``uniform``: their plain
            mean. In the warm-up ``paper`` means ``unbiased``, which is eq. 8.
        local: algorithm such as FedProx, which changes the gradients of clients; its weighting plays no part.
        group_by: examples for a client's scores of the selectors: ``val``, its validation examples (the paper); ``own``, all
            of its training and validation examples: more, but the selectors have been trained on some of them.

    Attributes:
        groups: client id -> number of its selector, of several the one of largest weight; empty before the first grouping.
        losses: client id -> its mean loss under each selector, at the last grouping.
        grouped_round: the round of the last grouping, or None.

    Raises:
        ValueError: a setting is out of range; before the first round, for a module or data that do not fit.
    """

    gradients_alone = "Control variates are about a fixed set of clients for each model; the groups change"
    buffers = ("refuse",)  # of the base, which groups would share that are to differ

    def __init__(
        self,
        warmup_rounds: int = 50,
        regroup_every: int = 50,
        assignment: Assignment | None = None,
        weighting: Literal["paper", "unbiased", "normalized", "uniform"] = "paper",
        local: Algorithm | None = None,
        group_by: LossesOn = "val",
    ) -> None:
        super().__init__("unbiased" if weighting == "paper" else weighting, local)
        refuse_below(0, warmup_rounds=warmup_rounds)
        refuse_below(1, regroup_every=regroup_every)
        self.warmup_rounds, self.regroup_every = warmup_rounds, regroup_every
        self.assignment, self.group_by = assignment or GreedyGroups(), group_by
        self.share_alone = weighting == "paper"
        self.groups: dict[str, int] = {}
        self.losses: dict[str, list[float]] = {}
        self.grouped_round: int | None = None
        self._adapters: list[str] = []
        self._selector_of: dict[str, int] = {}
        self._warming: int | None = None

    # The server: it groups the clients, and moves each selector by its group

    def check_settings(self, federation: Federation) -> None:
        self.assignment.check_settings(federation)
        # A user's module may make its adapters with its model, so that `check` is the first to know them.
        adapters = federation.module.adapter_names if isinstance(federation.module, HoldsAdapters) else ()
        if len(adapters) > 1:
            federation.check_losses(self.group_by)
        if (warmup := self.warmup_rounds * len(adapters)) >= federation.num_rounds and adapters:
            raise ValueError(
                f"the warm-up of {len(adapters)} selectors takes {warmup} rounds and the run has {federation.num_rounds}: "
                f"no client would ever be grouped. Lower warmup_rounds={self.warmup_rounds} or raise trainer.max_epochs"
            )

    def check(self, federation: Federation) -> None:
        self._adapters, self._selector_of = adapter_numbers(federation.module, "FedBiscuit")
        self._members, self._group_shares = [0] * len(self._adapters), [1.0] * len(self._adapters)
        self.assignment.check(federation, len(self._adapters))

    def prepare_round(self, round_idx: int, cohort: Sequence[Client], federation: Federation) -> None:
        self._warming = None if self._is_warm(round_idx) else round_idx // self.warmup_rounds

    def _is_warm(self, round_idx: int) -> bool:
        return round_idx >= self.warmup_rounds * len(self._adapters)

    def plan(self, round_idx: int, cohort: Sequence[Client], num_batches: NumBatches) -> list[Visit]:
        visits = super().plan(round_idx, cohort, num_batches)
        # Of any round: budgets plan all rounds before the first.
        several = self.assignment.all_selectors and self._is_warm(round_idx) and len(self._adapters) > 1
        if not several:
            return visits
        return [replace(visit, part=name) for visit in visits for name in self._adapters]

    def start_round(self, round_idx: int, cohort: Sequence[Client], federation: Federation) -> None:
        federation.log({"grouping_bytes_down": 0.0, "grouping_bytes_up": 0.0})
        trained_for = round_idx - self.warmup_rounds * len(self._adapters)
        others = self.groups.keys() != federation.clients.keys()  # nodes of a deployment come and go
        if trained_for >= 0 and (others or trained_for % self.regroup_every == 0):
            self._regroup(round_idx, federation)
        self._weigh(federation.clients)

    @property
    def weights(self) -> Mapping[str, list[float]]:
        """Client id -> its weights over the selectors; empty where each client has one."""
        return self.assignment.weights

    def _weigh(self, clients: Mapping[str, Client]) -> None:
        """Note how many clients may train each selector, and their shares of all examples, by their weights for it."""
        self._members, self._group_shares = [], []
        for u in range(len(self._adapters)):
            several = {client: weights[u] for client, weights in self.weights.items()}
            members = several or {client: 1.0 for client, group in self.groups.items() if group == u}
            # Of all clients it is 1, which a sum of their shares may miss by a rounding.
            is_whole = not several and len(members) == len(clients)
            shares = [clients[client].share * weight for client, weight in members.items()]
            self._members.append(len(members))
            self._group_shares.append(1.0 if is_whole else math.fsum(shares))

    def _regroup(self, round_idx: int, federation: Federation) -> None:
        """Send all selectors to all clients, and assign each client by its losses."""
        clients, self.grouped_round = list(federation.clients), round_idx
        if len(self._adapters) == 1:
            self.groups = dict.fromkeys(clients, 0)
            return
        selectors = {name: value for name, value in federation.state.items() if name in self._selector_of}
        payload = federation.broadcast(selectors)
        with federation.holding(payload.state):  # as a lossy channel delivers them
            by_selector = federation.adapter_losses(self.group_by, self._adapters)
        self.losses = {client: [float(losses[client].mean()) for losses in by_selector] for client in clients}
        losses = refuse_diverged(np.array([*self.losses.values()]))
        groups = self.assignment.assign(losses, by_selector, federation).tolist()
        self.groups = dict(zip(clients, groups, strict=True))
        sent = {"down": payload.num_bytes, "up": serialized_bytes({"losses": zeros(len(self._adapters))})}
        federation.log({f"grouping_bytes_{way}": float(size * len(clients)) for way, size in sent.items()})

    def _selector(self, visit: Visit) -> int:
        if self._warming is not None:
            return self._warming
        if visit.part:
            return self._adapters.index(visit.part)
        # Before the first grouping only sizes are asked for, and selectors are equally large.
        return self.groups[visit.client_id] if self.groups else 0

    def send(self, visit: Visit, client: Client, state: State) -> State:
        if not self._selector_of:  # asked for sizes without a run: the state is that of one selector
            return state
        selector = self._selector(visit)
        if unknown := [name for name in state if name not in self._selector_of]:
            raise ValueError(
                f"{unknown[0]} joined the optimizer after the start, and FedBiscuit shares out the adapters that it knew "
                "then: let the optimizer hold all of them from the start, and nothing else"
            )
        return {name: value for name, value in state.items() if self._selector_of[name] == selector}

    def finish_visit(self, visiting: Visiting, movement: State, work: Work) -> Update | None:
        client, selector = visiting.client, self._selector(visiting.visit)
        weight = 1.0 if self.weighting == "uniform" else client.share
        if self._warming is None and self.weights:
            weight *= self.weights[client.id][selector]
        if self._warming is None and self.weighting == "unbiased" and not self.share_alone and weight:
            weight /= self._group_shares[selector]  # the mean over the group in expectation
        return Update(client.id, movement, weight) if weight else None

    def aggregation(self, num_clients: int) -> Aggregation:
        if self._warming is not None or self.weighting != "unbiased":  # warm-up: eq. 8
            return weighted_sum(self.weighting, num_clients)
        if self.share_alone:
            return WeightedSum("one")  # eq. 6: p_m alone
        sizes = {name: float(self._members[selector]) for name, selector in self._selector_of.items()}
        return WeightedSum("count", scale=sizes)

    def tell(self, client_ids: Sequence[str]) -> dict[str, Any]:
        return {"groups": {name: self.groups[name] for name in client_ids if name in self.groups}}

    def hear(self, told: Mapping[str, Any]) -> None:
        self.groups = dict(told.get("groups", {}))

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("groups", "losses", "weights", "grouped_round")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.groups, self.losses = state["groups"], state["losses"]
        self.grouped_round, self.assignment.weights = state["grouped_round"], state["weights"]

    # The client: it trains the selector of its group, as ``local`` does

    def start_visit(self, visit: Visit, client: Client, received: State) -> Visiting:
        visiting = super().start_visit(visit, client, received)
        if self._adapters:
            visiting.adapter = self._adapters[self._selector(visit)]
        return visiting


class GreedyGroups(Assignment):
    """Step 2.1, a balanced assignment: sizes of groups differ by at most 1 (equation 4 under the constraint of 5).

    Each client wants the selector under which its validation loss is least. The most wanted selector is closed at its cap,
    ``ceil(unassigned clients / open selectors)``, which it always reaches; the rest move to their next best, and so on. The
    paper leaves open which clients stay at a crowded one: here those that would lose most by moving.

    Examples:
        >>> losses = np.array([[0.1, 0.9], [0.2, 0.3], [0.0, 0.4], [0.3, 0.2]])
        >>> greedy(losses).tolist()  # three want selector 0, and the second loses least by moving
        [0, 1, 0, 1]
    """

    def assign(self, losses: np.ndarray, by_example: ByExample, federation: Federation) -> np.ndarray:
        return greedy(losses)


def greedy(losses: np.ndarray) -> np.ndarray:
    """Return the selector of each client, ``(clients,)``, by losses ``(clients, selectors)``: see `GreedyGroups`."""
    num_clients, num_selectors = refuse_diverged(losses).shape
    groups = np.full(num_clients, -1)
    still_open = list(range(num_selectors))
    while still_open:
        waiting = np.flatnonzero(groups < 0)
        offered = losses[waiting][:, still_open]
        wanted = offered.argmin(axis=1)
        place = int(np.bincount(wanted, minlength=len(still_open)).argmax())
        cap = -(-len(waiting) // len(still_open))  # eq. 5
        candidates = np.flatnonzero(wanted == place)
        others = np.delete(offered[candidates], place, axis=1)
        # inf: from the last selector no client can move.
        loss_of_moving = others.min(axis=1, initial=np.inf) - offered[candidates, place]
        stay = candidates[np.argsort(-loss_of_moving, kind="stable")[:cap]]
        groups[waiting[stay]] = still_open.pop(place)
    return groups
