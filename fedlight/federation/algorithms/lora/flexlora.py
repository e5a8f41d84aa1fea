"""FlexLoRA: the products of the clients' LoRA factors are averaged, and the average is cut to each client's rank by its SVD.

Bai et al., "Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client Resources", NeurIPS 2024,
https://arxiv.org/abs/2402.11505, section 3:

    W <- sum_k p_k B_k A_k = U S V^T,  p_k = n_k / sum_j n_j over the clients of the round
    client k of rank r_k goes on from B_k = U[:, :r_k] S[:r_k], A_k = V^T[:r_k]

with n_k examples of client k. The scaling alpha / R is the same for all and left out. W, as large as the layer, is never
formed (`fedlight.federation.lora.products`). The global model has the rank R of the module's adapters: the R largest
singular values of W; a client gets the first of them. What W has beyond R is lost; ``fed/product_error`` says how much.

The clients of a smaller rank add nothing to the directions that they do not have, which shrink in every round by their
share. Wu et al., "Preventing Rank Collapse in Federated Low-Rank Adaptation with Client Heterogeneity", 2026,
https://arxiv.org/abs/2602.13486 (raFLoRA), average each direction over the clients that have it, ``missing="skip"``:

    W <- sum_j sum_{k: r_k >= j} (p_k / sum_{i: r_i >= j} p_i) B_k[:, j] A_k[j]

A direction that no client of the round has stays as it is in the global model.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from fedlight.federation.algorithm import Aggregation, Algorithm, WeightedSum
from fedlight.federation.algorithms.lora.product_average import NOISE
from fedlight.federation.algorithms.lora.unlike_ranks import UnlikeRanks
from fedlight.federation.client import State, Update, Visiting, Work
from fedlight.federation.lora.pairs import LoraPair, trained_pairs
from fedlight.federation.lora.products import ProductSums, Term, refuse_fixed_coordinates, singular_vectors
from fedlight.federation.lora.ranks import LoraRanks
from fedlight.federation.protocols import Federation

HOLDS = "has:"
"""Prefix of a vector with 1 for each direction that a client has, and 0 for others; no parameter's name has a colon."""


class FlexLoRA(UnlikeRanks):
    """Average of the products of LoRA factors of unlike ranks, cut to each client's rank by singular values.

    The factors of a round stay in memory until its end. Other parameters are averaged with the same weights.

    Args:
        missing: a client's addition to directions that it does not have: ``zero``, as in the paper, or nothing (``skip``),
            so that each is the average over the clients that have it.
        ranks: of the clients, as for `UnlikeRanks`.
        weighting: ``normalized`` as in the paper, by the clients' examples, or ``uniform``.
        local: algorithm such as FedProx, which may change only the clients' gradients; its weighting plays no part.

    Raises:
        ValueError: a setting is out of range; in ``check``, for a module without a LoRA adapter or with another kind of it,
            several adapters, a robust aggregation, a server optimizer other than plain averaging, or error feedback.
    """

    def __init__(
        self,
        missing: Literal["zero", "skip"] = "zero",
        weighting: Literal["uniform", "normalized"] = "normalized",
        local: Algorithm | None = None,
        ranks: LoraRanks | None = None,
    ) -> None:
        super().__init__(ranks, weighting, local)
        self.missing = missing
        self._pairs: list[LoraPair] = []
        self._federation: Federation | None = None

    # The server

    def check(self, federation: Federation) -> None:
        super().check(federation)
        self._pairs, self._federation = trained_pairs(federation, "FlexLoRA"), federation
        refuse_fixed_coordinates(federation, "FlexLoRA", other="HetLoRA")

    def finish_visit(self, visiting: Visiting, movement: State, work: Work) -> Update | None:
        update = super().finish_visit(visiting, movement, work)
        if update is None or self.missing == "zero":
            return update
        holds = {HOLDS + pair.a: torch.ones(pair.rank(movement), dtype=torch.float64) for pair in self._pairs}
        for vector in holds.values() if visiting.lora_rank is not None else ():
            vector[visiting.lora_rank :] = 0  # r_k < j
        return replace(update, movement=movement | holds)

    def aggregation(self, num_clients: int) -> Aggregation:
        mean = WeightedSum("weight")
        return ProductSums(mean, mean, self._pairs, self._to_new_factors)

    def _to_new_factors(self, sums: ProductSums, movement: State) -> State:
        """Return the movement of a round with that to new factors in the place of the factors' own."""
        assert self._federation is not None
        state = self._federation.state
        new = {name: value for name, value in movement.items() if not name.startswith(HOLDS)}
        for pair in self._pairs:
            a, b = state[pair.a].double(), state[pair.b].double()
            if terms := sums.terms(pair, state):
                if self.missing == "skip":
                    terms = over_holders(terms, movement[HOLDS + pair.a], b, a)
                new_b, new_a = best_factors(terms, a)
                new[pair.a], new[pair.b] = new_a - a, new_b - b
        return new


def over_holders(terms: Sequence[Term], shares: Tensor, b: Tensor, a: Tensor) -> list[Term]:
    """Return terms whose directions are means over the clients that have them; one that no client has is the server's.

    Args:
        terms: the clients' products, whose coefficients sum to 1; a direction that a client does not have is 0.
        shares: sum of the coefficients of those that have a direction, ``(R,)``.
        b: the server's B, ``(out, R)``.
        a: the server's A, ``(R, in)``.

    Examples:
        >>> b, a = torch.tensor([[1.0, 2.0]]).double(), torch.eye(2).double()
        >>> small = Term(0.5, torch.tensor([[3.0, 0.0]]).double(), torch.tensor([[1.0, 0.0], [0.0, 0.0]]).double())
        >>> terms = over_holders([small, Term(0.5, b, a)], torch.tensor([1.0, 0.5]).double(), b, a)
        >>> sum(term.coefficient * term.b @ term.a for term in terms).tolist()
        [[2.0, 2.0]]
    """
    nobodys = shares == 0
    # Column j over the sum of p_i of the clients with r_i >= j.
    shared = [Term(term.coefficient, term.b / shares.where(~nobodys, 1.0), term.a) for term in terms]
    return [*shared, Term(1.0, b[:, nobodys], a[nobodys])] if nobodys.any() else shared


def best_factors(terms: Sequence[Term], a: Tensor) -> tuple[Tensor, Tensor]:
    """Return B, ``(out, R)``, and A, ``(R, in)``, whose product is the nearest of rank R to the sum of terms, in fp64.

    B = U S and A = V^T of the largest singular values, in falling order, so the first r columns and rows are the nearest
    product of rank r (Eckart and Young, 1936). A direction without a singular value, to the rounding of fp32 factors, has a
    column of 0 in B and keeps its row of A.

    Examples:
        >>> term = Term(1.0, torch.tensor([[0.0, 3.0], [0.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
        >>> [factor.abs().tolist() for factor in best_factors([term], torch.full((2, 2), 0.5))]
        [[[6.0, 0.0], [0.0, 0.0]], [[0.0, 1.0], [0.5, 0.5]]]
    """
    u, s, v = singular_vectors([Term(term.coefficient, term.b.double(), term.a.double()) for term in terms])
    rank = a.shape[0]
    new_b, new_a = torch.zeros(u.shape[0], rank, dtype=torch.float64), a.double().clone()
    known = min(rank, int((s > NOISE * s[0]).sum()))
    new_b[:, :known] = u[:, :known] * s[:known]
    # Other rows stay as they were: with a row of 0 too a direction would never have a gradient again.
    new_a[:known] = v[:known]
    return new_b, new_a
