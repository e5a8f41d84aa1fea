"""ProductAverage (FLoRIST): the server averages the products B A, and takes new factors from their singular values.

Ramesh and Dass, "FLoRIST: Singular Value Thresholding for Efficient and Accurate Federated Fine-Tuning of Large Language
Models", https://arxiv.org/abs/2506.09199. With the sampled clients' factors stacked, and c_i their weights,

    M = sum c_i B_i A_i = [B_1 ... B_K] diag(c) [A_1; ...; A_K] = U diag(s) V^T,

from two QR decompositions and the SVD of a small matrix (`fedlight.federation.lora.products`), never from M itself. The
server keeps the p largest singular values, with the smallest p that satisfies

    (s_1^2 + ... + s_p^2) / (s_1^2 + s_2^2 + ...)  >=  threshold

and at most the rank R of the adapters: by Eckart and Young the best product of that rank. ``fed/product_error`` says how
much is cut off. Deviations from the paper:

* Weights that do not sum to 1 (``unbiased``) weight the products' movements, like those of parameters in `Algorithm`.
* The paper stacks two thin SVDs where we stack two QR decompositions; the product is the same.
* How ``U diag(s) V^T`` is shared out between B and A is free in the product and matters for the next steps. Here
  ``A = a V^T`` and ``B = U diag(s) / a``, with a the root mean square of the norms of the server's rows of A before.
* Clients start the next round from the new factors. With a threshold below 1 the server sends p rows and columns, clients
  train and send back these alone, and a later round may find more singular values, because the clients' directions differ.
  With 1 nothing that the rank R allows is cut; where M has fewer than R singular values above ``2^-20 s_1``, the rest of the
  old A fills the other rows of A, with columns of 0 in B.

Other trained tensors, such as a head, are averaged as in FedAvg.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedlight.federation.algorithm import Aggregation, Algorithm, Weighting, WithLocal, weighted_sum
from fedlight.federation.client import Client, State, Visit, Visiting, Work
from fedlight.federation.lora.pairs import LoraPair, pad_to, slice_to_rank, trained_pairs
from fedlight.federation.lora.products import ProductSums, Term, refuse_fixed_coordinates, singular_vectors
from fedlight.federation.protocols import Federation

NOISE = 2.0**-20
"""Singular values below this share of the largest are rounding of fp32 factors."""


class ProductAverage(WithLocal):
    """Average of the products of LoRA factors, cut to the adapters' rank or below by a threshold.

    The factors of a round's clients are kept until it is over.

    Args:
        threshold: least share of the squared singular values that is kept, in (0, 1]; 1 keeps all that the rank allows.
        weighting: of the clients, as for `Algorithm`.
        local: algorithm such as FedProx, which may change only the clients' gradients; its weighting plays no part.

    Raises:
        ValueError: ``threshold`` is out of its range; in ``check``, for a module without a LoRA adapter or with another kind
            of it, for an aggregation or a server that takes factors for parameters of a fixed meaning, or for a channel with
            error feedback.
    """

    def __init__(
        self, threshold: float = 1.0, weighting: Weighting = "unbiased", local: Algorithm | None = None
    ) -> None:
        super().__init__(weighting, local)
        if not 0 < threshold <= 1:
            raise ValueError(
                f"threshold={threshold}, a share of the squared singular values, must be in (0, 1]"
            )
        self.threshold = threshold
        self._pairs: list[LoraPair] = []
        self._ranks: dict[str, int] = {}  # by the name of A, of those that are cut below the adapters' rank
        self._full: dict[str, int] = {}
        self._federation: Federation | None = None

    # The server

    def check(self, federation: Federation) -> None:
        super().check(federation)
        self._pairs = trained_pairs(federation, "ProductAverage")
        parameters = dict(federation.module.named_parameters())
        self._full = {pair.a: pair.rank(parameters) for pair in self._pairs}
        refuse_fixed_coordinates(federation, "ProductAverage", other="FFALoRA")

    def start_round(self, round_idx: int, cohort: Sequence[Client], federation: Federation) -> None:
        self._federation = federation

    def send(self, visit: Visit, client: Client, state: State) -> State | None:
        return self._cut(state) if self._ranks else state

    def aggregation(self, num_clients: int) -> Aggregation:
        inner = weighted_sum(self.weighting, num_clients)
        return ProductSums(inner, inner, self._pairs, self._to_new_factors)

    def _to_new_factors(self, sums: ProductSums, movement: State) -> State:
        """Return the movement of a round with that to new factors in the place of the factors' own."""
        assert self._federation is not None
        ranks, new, state = dict(self._ranks), dict(movement), self._federation.state
        for pair in self._pairs:
            new.pop(pair.a, None)
            new.pop(pair.b, None)
            terms = sums.terms(pair, state)
            a, b = state[pair.a].double(), state[pair.b].double()
            factors = new_factors(terms, a, self.threshold) if terms else None
            # Of a product of 0 the old factors stay, as new ones would have no gradient.
            if factors is not None:
                new_b, new_a = factors
                ranks[pair.a] = new_a.shape[0]
                new[pair.a], new[pair.b] = pad_to(new_a, a.shape) - a, pad_to(new_b, b.shape) - b
        self._ranks = {name: rank for name, rank in ranks.items() if rank < self._full[name]}
        return new

    def tell(self, client_ids: Sequence[str]) -> dict[str, Any]:
        return {"ranks": dict(self._ranks)}

    def hear(self, told: Mapping[str, Any]) -> None:
        self._ranks = dict(told.get("ranks", {}))

    def state_dict(self) -> dict[str, Any]:
        return {"ranks": dict(self._ranks)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._refuse_without(state, "ranks", "ranks")
        self._ranks = dict(state["ranks"])

    # A client: it trains the rows of A and columns of B that it has received

    def start_visit(self, visit: Visit, client: Client, received: State) -> Visiting:
        start, ranks = dict(received), dict[str, int]()
        for pair in self._pairs if self._ranks else ():
            a, b, full = received[pair.a], received[pair.b], self._full[pair.a]
            start |= {pair.a: pad_to(a, (full, a.shape[1])), pair.b: pad_to(b, (b.shape[0], full))}
            ranks |= dict.fromkeys((pair.a, pair.b), len(a))
        visiting = super().start_visit(visit, client, start)
        return replace(visiting, received=received, ranks=ranks)

    def adjust_gradients(
        self, visiting: Visiting, parameters: Mapping[str, Tensor], gradients: dict[str, Tensor]
    ) -> None:
        # The received factors may lack rows and columns of 0 that the client trains with.
        whole = replace(visiting, received=visiting.start)
        super().adjust_gradients(whole, parameters, gradients)

    def reply(self, visiting: Visiting, trained: State, work: Work) -> State:
        return self._cut(trained) if self._ranks else trained

    def _cut(self, state: State) -> State:
        """Return a state with the rows of A and columns of B that are in use."""
        cut = dict(state)
        for pair in self._pairs:
            both = {name: state[name] for name in (pair.a, pair.b)}
            cut |= slice_to_rank(both, [pair], self._ranks.get(pair.a, self._full[pair.a]))
        return cut


def new_factors(terms: Sequence[Term], a: Tensor, threshold: float) -> tuple[Tensor, Tensor] | None:
    """Return factors of the sum of some products, at most of the rank of the old A; None for a sum of 0.

    Args:
        terms: products whose sum is wanted.
        a: the server's A, ``(R, in)`` fp64; rows of 0 are not in use.
        threshold: least share of the squared singular values, in (0, 1].

    Returns:
        B, ``(out, p)``, and A, ``(p, in)``, with p at most R, and equal to R for a threshold of 1.

    Examples:
        >>> a = torch.tensor([[3.0, 0.0], [0.0, 3.0]]).double()
        >>> terms = [Term(1.0, torch.tensor([[2.0, 0.0], [0.0, 1.0]]).double(), a)]
        >>> b, new_a = new_factors(terms, a, threshold=0.8)  # singular values 6 and 3, and 36 / 45 is 0.8
        >>> [round(value, 9) + 0.0 for value in [*b.flatten().tolist(), *new_a.flatten().tolist()]]
        [2.0, 0.0, 3.0, 0.0]
    """
    rank = a.shape[0]
    u, s, v = singular_vectors(terms)
    if not s[0] > 0:
        return None
    kept = min(rank, int((s > NOISE * s[0]).sum()))
    if threshold < 1:
        shares = s.square().cumsum(0) / s.square().sum()
        # A share that is the threshold but for the rounding of its sum counts as the threshold.
        kept = min(kept, int((shares < threshold - 1e-12).sum()) + 1)
    norms = a.norm(dim=1)
    in_use = int(norms.count_nonzero())  # the others were cut off
    size = (norms.square().sum() / in_use).sqrt() if in_use else torch.ones((), dtype=torch.float64)
    rows, columns = v[:kept], u[:, :kept] * s[:kept]
    if threshold == 1 and kept < rank:  # else the adapter could not use its rank
        rest = a - (a @ rows.T) @ rows  # orthogonal to the kept rows
        free = torch.linalg.svd(rest, full_matrices=False)[2][: rank - kept]
        # The signs of singular vectors are free: rows keep the side of the old A.
        free = free * torch.where((free @ a.T).sum(dim=1, keepdim=True) < 0, -1.0, 1.0)
        rows, columns = torch.cat([rows, free]), pad(columns, (0, rank - kept))
    # A keeps its size, and rows with a small singular value can learn as well as others.
    return columns / size, rows * size
