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
from torch import nn, zeros

from fedlight.federation.aggregation import Aggregation, WeightedSum
from fedlight.federation.algorithm import Algorithm, WithLocal
from fedlight.federation.algorithms.assignments import Assignment, ByExample, refuse_diverged
from fedlight.federation.channel import serialized_bytes
from fedlight.federation.client import Client, Update, Visit, Visiting, Work
from fedlight.federation.protocols import Federation, HoldsAdapters, LossesOn, NumBatches
from fedlight.federation.state import State, read, write

WHY_GRADIENTS_ALONE = (
    "Control variates, for one, are about a fixed set of clients for each model, and the groups change"
)


class GreedyGroups(Assignment):
    """The paper's assignment: groups of equal size, by `greedy`."""

    def assign(self, losses: np.ndarray, by_example: ByExample, federation: Federation) -> np.ndarray:
        return greedy(losses)


class FedBiscuit(WithLocal):
    """Warm-up of each selector in turn, then grouping and training by group.

    Args:
        warmup_rounds: T, rounds of warm-up for each selector, at least 0.
        regroup_every: tau, rounds between groupings, at least 1.
        assignment: way of assigning clients to selectors; `GreedyGroups`, the paper's, if not given.
        weighting: after the warm-up; ``paper``: p_m alone (eq. 6); ``unbiased``: the mean over the group in
            expectation; ``normalized``: weights sum to 1 over the group's sampled members; ``uniform``: their plain
            mean. In the warm-up ``paper`` means ``unbiased``, which is eq. 8.
        local: what clients do beyond FedAvg, such as FedProx; it may change gradients alone; its weighting plays no
            part.
        group_by: examples on which a client scores the selectors: ``val``, its validation examples (the paper); ``own``, all
            of its training and validation examples, which are more, but some of which the selectors have been trained on.

    Attributes:
        groups: client id -> number of its selector, of several the one of largest weight; empty before the first grouping.
        losses: client id -> its mean loss under each selector, at the last grouping.
        grouped_round: the round of the last grouping, or None.

    Raises:
        ValueError: a setting is out of range; in ``check``, for a module or data that do not fit.
    """

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
        super().__init__("unbiased" if weighting == "paper" else weighting, local, WHY_GRADIENTS_ALONE)
        if warmup_rounds < 0 or regroup_every < 1:
            raise ValueError(
                f"warmup_rounds={warmup_rounds} must be at least 0 and regroup_every={regroup_every} at least 1"
            )
        self.warmup_rounds = warmup_rounds
        self.regroup_every = regroup_every
        self.assignment = assignment or GreedyGroups()
        self.group_by = group_by
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
        # A module of one's own may make its adapters with its model, so that `check` is the first to know them.
        if isinstance(federation.module, HoldsAdapters):
            self._check_groups(federation, list(federation.module.adapter_names))

    def check(self, federation: Federation) -> None:
        self.check_settings(federation)
        module = federation.module
        if not isinstance(module, HoldsAdapters):
            raise ValueError(
                f"FedBiscuit trains several adapters of one module, and {type(module).__name__} has no adapter_names and "
                "use_adapter: derive it from LanguageModule, or add both (docs/own_module.md has an example)"
            )
        self._adapters = list(module.adapter_names)
        self._members, self._group_shares = [0] * len(self._adapters), [1.0] * len(self._adapters)
        self._selector_of = {name: self._owner(name) for name in _trained(module)}
        self.assignment.check(federation, len(self._adapters))

    def _check_groups(self, federation: Federation, adapters: Sequence[str]) -> None:
        if len(adapters) > 1:
            federation.check_losses(self.group_by)
        warmup = self.warmup_rounds * len(adapters)
        if warmup >= federation.num_rounds:
            raise ValueError(
                f"the warm-up of {len(adapters)} selectors takes {warmup} rounds and the run has "
                f"{federation.num_rounds}: no client would ever be grouped. Lower warmup_rounds="
                f"{self.warmup_rounds} or raise trainer.max_epochs"
            )

    def _owner(self, name: str) -> int:
        owners = [index for index, adapter in enumerate(self._adapters) if adapter in name.split(".")]
        if len(owners) != 1:
            raise ValueError(
                f"{name} is trained and belongs to no single adapter: every group would change it"
            )
        return owners[0]

    def prepare_round(self, round_idx: int, cohort: Sequence[Client], federation: Federation) -> None:
        is_warm = round_idx >= self.warmup_rounds * len(self._adapters)
        self._warming = None if is_warm else round_idx // self.warmup_rounds

    def plan(self, round_idx: int, cohort: Sequence[Client], num_batches: NumBatches) -> list[Visit]:
        visits = super().plan(round_idx, cohort, num_batches)
        if not self.assignment.all_selectors or self._warming is not None or len(self._adapters) < 2:
            return visits
        return [replace(visit, part=adapter) for visit in visits for adapter in self._adapters]

    def start_round(self, round_idx: int, cohort: Sequence[Client], federation: Federation) -> None:
        federation.log({"grouping_bytes_down": 0.0, "grouping_bytes_up": 0.0})
        trained_for = round_idx - self.warmup_rounds * len(self._adapters)
        if trained_for >= 0 and trained_for % self.regroup_every == 0:
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
            several = {client: own[u] for client, own in self.weights.items()}
            members = several or {client: 1.0 for client, own in self.groups.items() if own == u}
            # Of all clients it is 1, which a sum of their shares may miss by a rounding.
            is_whole = not several and len(members) == len(clients)
            shares = [clients[client].share * weight for client, weight in members.items()]
            self._members.append(len(members))
            self._group_shares.append(1.0 if is_whole else math.fsum(shares))

    def _regroup(self, round_idx: int, federation: Federation) -> None:
        """Send all selectors to all clients, and assign each client by its losses."""
        module, clients = federation.module, list(federation.clients)
        self.grouped_round = round_idx
        if len(self._adapters) == 1:
            self.groups = dict.fromkeys(clients, 0)
            return
        parameters = _trained(module)
        state = read(parameters)
        payload = federation.broadcast(state)
        write(payload.state, parameters)
        by_selector = federation.adapter_losses(self.group_by, self._adapters)
        write(state, parameters)
        self.losses = {client: [float(own[client].mean()) for own in by_selector] for client in clients}
        losses = np.array(list(self.losses.values()))
        refuse_diverged(losses)
        groups = self.assignment.assign(losses, by_selector, federation)
        self.groups = dict(zip(clients, groups.tolist(), strict=True))
        answer = serialized_bytes({"losses": zeros(len(self._adapters))})
        sent = {"down": payload.num_bytes, "up": answer}
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
        unknown = [name for name in state if name not in self._selector_of]
        if unknown:
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
        if weight == 0:
            return None
        if self._warming is None and self.weighting == "unbiased" and not self.share_alone:
            weight /= self._group_shares[selector]
        return Update(client.id, movement, weight)

    def aggregation(self, num_clients: int) -> Aggregation:
        if self._warming is not None or self.weighting != "unbiased":
            return super().aggregation(num_clients)
        if self.share_alone:
            return WeightedSum("one")
        sizes = {name: float(self._members[selector]) for name, selector in self._selector_of.items()}
        return WeightedSum("count", scale=sizes)

    def tell(self, client_ids: Sequence[str]) -> dict[str, Any]:
        return {"groups": {name: self.groups[name] for name in client_ids if name in self.groups}}

    def hear(self, told: Mapping[str, Any]) -> None:
        self.groups = dict(told.get("groups", {}))

    def state_dict(self) -> dict[str, Any]:
        grouping = {"groups": self.groups, "losses": self.losses, "grouped_round": self.grouped_round}
        return grouping | {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.groups, self.losses = state["groups"], state["losses"]
        self.grouped_round, self.assignment.weights = state["grouped_round"], state["weights"]

    # The client: it trains the selector of its group, as ``local`` does

    def start_visit(self, visit: Visit, client: Client, received: State) -> Visiting:
        visiting = super().start_visit(visit, client, received)
        if self._adapters:
            visiting.adapter = self._adapters[self._selector(visit)]
        return visiting


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


# Step 2.1, a balanced assignment: each client wants the selector under which its validation loss is least, and no two
# selectors may differ by more than one client (eq. 4 under the constraint of eq. 5). The paper caps crowded selectors one
# after the other and leaves open which clients stay: here those stay that would lose most by moving.


def greedy(losses: np.ndarray) -> np.ndarray:
    """Return the paper's assignment: close the most wanted selector at its cap, move the rest to their next best, repeat.

    The cap is ``ceil(unassigned clients / open selectors)``; the most wanted selector always reaches it.

    Args:
        losses: ``(clients, selectors)``, finite.

    Returns:
        The selector of each client, ``(clients,)``; group sizes differ by at most 1.

    Examples:
        >>> losses = np.array([[0.1, 0.9], [0.2, 0.3], [0.0, 0.4], [0.3, 0.2]])
        >>> greedy(losses).tolist()  # three want selector 0, and the second loses least by moving
        [0, 1, 0, 1]
    """
    refuse_diverged(losses)
    num_clients, num_selectors = losses.shape
    groups = np.full(num_clients, -1)
    still_open = list(range(num_selectors))
    while still_open:
        waiting = np.flatnonzero(groups < 0)
        offered = losses[waiting][:, still_open]
        wanted = offered.argmin(axis=1)
        place = int(np.bincount(wanted, minlength=len(still_open)).argmax())
        cap = -(-len(waiting) // len(still_open))
        candidates = np.flatnonzero(wanted == place)
        others = np.delete(offered[candidates], place, axis=1)
        loss_of_moving = others.min(axis=1, initial=np.inf) - offered[candidates, place]
        stay = candidates[np.argsort(-loss_of_moving, kind="stable")[:cap]]
        groups[waiting[stay]] = still_open.pop(place)
    return groups
