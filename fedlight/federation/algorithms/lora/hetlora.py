"""HetLoRA: clients of unlike LoRA ranks, whose factors are padded with zeros and averaged by the size of their products.

Cho et al., "Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models", EMNLP 2024,
https://arxiv.org/abs/2401.06432, section 3.2. Client k gets the first r_k rows of A and columns of B, trains them, and

    truncation     A_k = A[:r_k], B_k = B[:, :r_k]
    self-pruning   a client minimizes F_k + lambda * |B_k[:, t:]| * |A_k[t:]| with t = gamma * r_k; where that product of
                   norms is smaller after the visit than before, it drops these rows and columns, and r_k <- t from then on
    aggregation    B <- sum_k p_k pad(B_k),  A <- sum_k p_k pad(A_k),  p_k = |B_k A_k|_F / sum_j |B_j A_j|_F,
                   where pad adds zero rows and columns up to the largest rank

Here p_k is taken for each layer by itself, and the norms of pruning are summed over layers, since a client has one rank. A
pruned client still sends that visit's factors at its old rank, and the server, which sees the same norms, drops the rest: so
a round's bytes are known before it. Tensors that are no LoRA factors are averaged with equal weights.

With zero-padding the rows that few clients have shrink in every round by the share of the others. Wu et al., "Preventing
Rank Collapse in Federated Low-Rank Adaptation with Client Heterogeneity", 2026, https://arxiv.org/abs/2602.13486, call it
rank collapse, and average each row over the clients that have it: ``missing="skip"``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedlight.federation.algorithm import Aggregation, Algorithm, WeightedSum
from fedlight.federation.algorithms.lora.unlike_ranks import UnlikeRanks
from fedlight.federation.client import State, Update, Visiting, Work
from fedlight.federation.exact_sum import ExactSums
from fedlight.federation.lora.pairs import LoraPair, find_pairs, trained_pairs
from fedlight.federation.lora.ranks import LoraRanks, prune
from fedlight.federation.protocols import Federation

WEIGHT = "weight of:"
"""Prefix of the sums of weights beside the sums of movements; no parameter's name has a colon."""


class HetLoRA(UnlikeRanks):
    """Averages of LoRA factors of unlike ranks, padded with zeros.

    With ``missing="skip"`` a row of A and a column of B that no client of a round has stay as they are.

    Args:
        sparsity_weighted: whether a layer's factors count by the norm of their product; else clients count by ``weighting``.
        missing: a client's addition to rows that it does not have: ``zero``, as in the paper, or nothing (``skip``), so that
            each row is the average over the clients that have it.
        gamma: share of its rank that a client keeps when it prunes itself, in (0, 1]; 1 never prunes.
        lam: lambda, strength of the penalty on what pruning would drop, at least 0.
        ranks: of the clients, as for `UnlikeRanks`.
        weighting: ``uniform`` as in the paper, or ``normalized``: also by the clients' examples.
        local: algorithm such as FedProx, which may change only the clients' gradients; its weighting plays no part.

    Raises:
        ValueError: a setting is out of range; in ``check``, for a module without a LoRA adapter or with another kind of it,
            a robust aggregation, several adapters, or a penalty under several optimizers or with forward-only visits.
    """

    def __init__(
        self,
        sparsity_weighted: bool = True,
        missing: Literal["zero", "skip"] = "zero",
        gamma: float = 1.0,
        lam: float = 0.0,
        weighting: Literal["uniform", "normalized"] = "uniform",
        local: Algorithm | None = None,
        ranks: LoraRanks | None = None,
    ) -> None:
        super().__init__(ranks, weighting, local)
        if not 0 < gamma <= 1:
            raise ValueError(f"gamma={gamma} must be above 0 and at most 1; 1 never prunes")
        if not 0 <= lam < float("inf"):
            raise ValueError(f"lam={lam} must be at least 0; 0 is no penalty")
        if lam > 0 and gamma == 1:
            raise ValueError(
                f"lam={lam} is a penalty for pruning, and gamma=1 never prunes: set gamma=0.75, or lam=0"
            )
        self.sparsity_weighted, self.missing = sparsity_weighted, missing
        self.gamma, self.lam = gamma, lam
        self._federation: Federation | None = None

    # The server

    def check(self, federation: Federation) -> None:
        super().check(federation)
        trained_pairs(federation, "HetLoRA")
        self._federation = federation
        if federation.robust:
            raise ValueError(
                "HetLoRA is an average of factors that are padded with zeros, of which a robust aggregation would take the "
                "zeros: take out aggregation, or use another algorithm"
            )
        if self.lam > 0 and len(federation.optimizers) > 1:
            raise ValueError(
                f"lam={self.lam}: the penalty is on a product of A and B, and the module's "
                f"{len(federation.optimizers)} optimizers may step them apart: give it one optimizer, or set lam to 0"
            )
        if self.lam > 0 and federation.train != "backprop":
            raise ValueError(
                f"lam={self.lam}: the penalty is on a product of A and B, which forward-only "
                "visits move one after the other: leave forward out, or set lam to 0"
            )

    def finish_visit(self, visiting: Visiting, movement: State, work: Work) -> Update | None:
        pairs = find_pairs(movement).pairs
        rank, pruned = self._rank_after(visiting, movement, pairs), dict(movement)
        for pair in pairs:  # a client no longer has the rows and columns that it pruned
            for name, where in ((pair.a, slice(rank, None)), (pair.b, (slice(None), slice(rank, None)))):
                pruned[name] = movement[name].clone()
                pruned[name][where] = -visiting.received[name][where].double()  # a movement to 0
        weight = 1.0 if self.weighting == "uniform" else visiting.client.share
        return RankedUpdate(visiting.client.id, pruned, weight, rank=rank)

    def aggregation(self, num_clients: int) -> Aggregation:
        state = State() if self._federation is None else self._federation.state
        return PaddedMeans(state, self.sparsity_weighted, self.missing)

    # The client

    @torch.no_grad()
    def adjust_gradients(
        self, visiting: Visiting, parameters: Mapping[str, Tensor], gradients: dict[str, Tensor]
    ) -> None:
        super().adjust_gradients(visiting, parameters, gradients)
        if self.lam == 0:
            return
        for pair in find_pairs(visiting.start).pairs:
            rank = pair.rank(visiting.start)
            rank = rank if visiting.lora_rank is None else min(visiting.lora_rank, rank)
            where = slice(self._pruned(rank), rank)
            a, b = parameters[pair.a][where], parameters[pair.b][:, where]
            a_norm, b_norm = a.norm(), b.norm()
            if pair.a in gradients and pair.b in gradients and a_norm * b_norm > 0:
                # The gradients of lambda * |B| * |A|.
                gradients[pair.a][where] += self.lam * b_norm / a_norm * a
                gradients[pair.b][:, where] += self.lam * a_norm / b_norm * b

    # Self-pruning

    def _pruned(self, rank: int) -> int:
        """Return the rank that is left when a client of ``rank`` prunes itself."""
        return max(1, int(self.gamma * rank + 1e-9))  # 0.7 * 10 is 6.999...

    def _rank_after(self, visiting: Visiting, movement: State, pairs: Sequence[LoraPair]) -> int:
        """Return the client's rank after the visit, and note it with the client where that is a smaller one."""
        rank = visiting.lora_rank
        if rank is None:  # not in a loop
            rank = max((pair.rank(movement) for pair in pairs), default=0)
        kept = self._pruned(rank)
        if kept >= rank:
            return rank
        before, after = 0.0, 0.0
        for pair in pairs:
            a, b = visiting.received[pair.a][kept:].double(), visiting.received[pair.b][:, kept:].double()
            before += (a.norm() * b.norm()).item()
            after += ((a + movement[pair.a][kept:]).norm() * (b + movement[pair.b][:, kept:]).norm()).item()
        if after >= before:
            return rank
        prune(visiting.client, kept)
        return kept


@dataclass(frozen=True)
class RankedUpdate(Update):
    """Update of a client of a LoRA rank, whose movement beyond that rank leads to 0."""

    rank: int = 0


class PaddedMeans(Aggregation):
    """Means of LoRA factors padded with zeros, given as movements from the server's; and means of other movements.

    Attributes:
        mean: a fresh weighted sum that says with what coefficient each client counts but for the size of its product.
    """

    keeps_factors = True

    def __init__(self, state: State, sparsity_weighted: bool, missing: str) -> None:
        self.mean = WeightedSum("weight")
        self._state, self._by_size, self._missing = state, sparsity_weighted, missing
        self._sums = WeightedSum("one")

    def add(self, update: Update) -> None:
        assert isinstance(update, RankedUpdate)
        parts, rank = dict[str, Tensor](), update.rank
        for pair in find_pairs(update.movement).pairs:
            # Rows of A and rows of B^T, so that both are padded and weighted alike.
            a, b = update.movement[pair.a].clone(), update.movement[pair.b].T.clone()
            size = 1.0
            if self._by_size:
                # |B_k A_k|, of the trained factors
                size = product_norm(update.received[pair.a] + a, update.received[pair.b].T + b)
            weights = torch.full((len(a), 1), update.weight * size, dtype=torch.float64)
            if self._missing == "skip":
                weights[rank:] = 0  # it does not have these rows
            a[rank:], b[rank:] = -self._state[pair.a][rank:], -self._state[pair.b].T[rank:]
            parts |= {pair.a: a * weights, pair.b: (b * weights).T.contiguous()}
            parts |= {WEIGHT + pair.a: weights, WEIGHT + pair.b: weights.T.contiguous()}
        for name in [name for name in update.movement if name not in parts]:
            value = update.movement[name]
            parts[name] = value * update.weight
            parts[WEIGHT + name] = torch.full([1] * value.ndim, update.weight, dtype=torch.float64)
        self._sums.add(Update(update.client_id, parts, 1.0))

    def partial(self) -> dict[str, Any]:
        return self._sums.partial()

    @property
    def sums(self) -> ExactSums:
        """Exact sums, which processes add up."""
        return self._sums.sums

    def merge(self, partial: Mapping[str, Any]) -> None:
        self._sums.merge(partial)

    def result(self) -> State:
        sums, means = self._sums.result(), State()
        for name in [name for name in sums if not name.startswith(WEIGHT)]:
            weights = sums[WEIGHT + name]
            # Without a weight there is no movement, and 0 / 1 is 0.
            means[name] = sums[name] / weights.where(weights > 0, 1.0)
        return means


def product_norm(a: Tensor, b: Tensor) -> float:
    """Return the Frobenius norm of ``b.T @ a`` from small matrices, for ``a`` ``(r, in)`` and ``b`` ``(r, out)``, fp64.

    Examples:
        >>> a, b = torch.tensor([[3.0, 0.0]]).double(), torch.tensor([[0.0, 1.0, 2.0]]).double()
        >>> round(product_norm(a, b) ** 2, 9)
        45.0
    """
    return float(((a @ a.T) * (b @ b.T)).sum().clamp(min=0).sqrt())  # a rounding may be below 0
