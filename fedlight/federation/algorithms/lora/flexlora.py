"""FlexLoRA: the products of the clients' LoRA factors are averaged, and the average is cut to each client's rank by its SVD.

Bai et al., "Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client Resources", NeurIPS 2024,
https://arxiv.org/abs/2402.11505, section 3:

    W <- sum_k p_k B_k A_k = U S V^T,  p_k = n_k / sum_j n_j over the clients of the round
    client k of rank r_k goes on from B_k = U[:, :r_k] S[:r_k], A_k = V^T[:r_k]

with n_k examples of client k. The scaling alpha / R is the same for all and left out. W, as large as the layer, is never
formed: it is the product of the stacked factors ``[p_1 B_1, p_2 B_2, ...]`` and ``[A_1; A_2; ...]``
(`fedlight.federation.lora.svd`). The global model has the rank R of the module's adapters: of W the R largest singular values,
of which clients get the first. What W has beyond R is lost. A direction without a singular value keeps its row of A.

The clients of a smaller rank add nothing to the directions that they do not have, which shrink in every round by their
share. Wu et al., "Preventing Rank Collapse in Federated Low-Rank Adaptation with Client Heterogeneity", 2026,
https://arxiv.org/abs/2602.13486 (raFLoRA), average each direction over the clients that have it, ``missing="skip"``:

    W <- sum_j sum_{k: r_k >= j} (p_k / sum_{i: r_i >= j} p_i) B_k[:, j] A_k[j]

A direction that no client of the round has keeps what the global model has of it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedlight.federation.aggregation import Aggregation, WeightedSum
from fedlight.federation.algorithm import Algorithm, refuse_more_than_gradients
from fedlight.federation.algorithms.lora.hetlora import check_missing, check_weighting
from fedlight.federation.client import Client, Update, Visit, Visiting, Work
from fedlight.federation.lora.pairs import LoraPair, find_pairs
from fedlight.federation.lora.ranks import cut_to_rank
from fedlight.federation.lora.svd import best_factors
from fedlight.federation.protocols import Federation
from fedlight.federation.state import State


class FlexLoRA(Algorithm):
    """Average of the products of LoRA factors of unlike ranks, cut to each client's rank by singular values.

    Ranks are those of ``federated.lora_ranks``; without them every client has the module's. The factors of the clients of a
    round stay in memory until its end. Parameters other than LoRA factors are averaged with the same weights.

    Args:
        missing: what a client adds to directions that it does not have: ``zero``, as in the paper, or nothing (``skip``), so
            that each is the average over the clients that have it.
        weighting: ``normalized`` as in the paper, by the clients' examples, or ``uniform``.
        local: what clients do beyond FedAvg, such as FedProx; it may change gradients alone; its weighting plays no part.

    Raises:
        ValueError: a setting is out of range; in ``check``, for a robust aggregation, a server optimizer other than plain
            averaging, or several adapters.
    """

    unlike_ranks = True

    def __init__(
        self,
        missing: Literal["zero", "skip"] = "zero",
        weighting: Literal["uniform", "normalized"] = "normalized",
        local: Algorithm | None = None,
    ) -> None:
        check_missing(missing)
        check_weighting(weighting, "FlexLoRA")
        super().__init__(weighting)
        self.missing = missing
        self.local = local or Algorithm()
        refuse_more_than_gradients(self.local, "FlexLoRA")

    # The server

    def check(self, federation: Federation) -> None:
        super().check(federation)
        self.local.check(federation)
        if federation.robust:
            raise ValueError(
                "FlexLoRA averages products of factors, which are not the clients' parameters: take out "
                "federated.aggregation, or use another algorithm"
            )
        if not federation.plain_server:
            raise ValueError(
                "FlexLoRA gives the server new factors of a product, and a part of the way from the old factors to new ones "
                "is no part of the way from product to product: take federated.server=Average with lr=1, or HetLoRA"
            )

    def finish_visit(self, visiting: Visiting, movement: State, work: Work) -> Update | None:
        client, found = visiting.client, dict(movement)
        for pair in find_pairs(movement).pairs:
            for name in (pair.a, pair.b):
                found[name] = (
                    visiting.received[name] + movement[name]
                )  # fp64, exact where nothing is lost on the way
        weight = 1.0 if self.weighting == "uniform" else client.share
        return OwnFactors(client.id, cut_to_rank(found, visiting.lora_rank), weight, visiting.sent)

    def aggregation(self, num_clients: int) -> Aggregation:
        return AverageOfProducts(self.missing)

    # The client

    def start_visit(self, visit: Visit, client: Client, received: State) -> Visiting:
        return self.local.start_visit(visit, client, received)

    def adjust_gradients(
        self, visiting: Visiting, parameters: Mapping[str, Tensor], gradients: dict[str, Tensor]
    ) -> None:
        self.local.adjust_gradients(visiting, parameters, gradients)


@dataclass(frozen=True)
class OwnFactors(Update):
    """Factors of a client's own rank, under the name of ``movement`` and beside other movements, and what it was sent."""

    sent: State


class AverageOfProducts(Aggregation):
    """Weighted mean of the products of LoRA factors, as the movement from the factors that were sent to those of the mean.

    Clients are taken in the order of their ids, so no bit depends on the order in which they come.
    """

    def __init__(self, missing: Literal["zero", "skip"]) -> None:
        self._missing = missing
        self._factors: dict[str, tuple[float, State]] = {}
        self._sent: State = {}
        self._others = WeightedSum("weight")

    def add(self, update: Update) -> None:
        assert isinstance(update, OwnFactors)
        factors = {name for pair in find_pairs(update.movement).pairs for name in (pair.a, pair.b)}
        self._factors[update.client_id] = (
            update.weight,
            {n: value for n, value in update.movement.items() if n in factors},
        )
        self._take_sent({name: update.sent[name] for name in factors})
        others = {name: value for name, value in update.movement.items() if name not in factors}
        self._others.add(Update(update.client_id, others, update.weight))

    def partial(self) -> dict[str, Any]:
        """Return the clients' factors, what was sent and the sums of other parameters, and start anew."""
        factors, self._factors, sent, self._sent = self._factors, {}, self._sent, {}
        return {"factors": factors, "sent": sent, "others": self._others.partial()}

    def pieces(self) -> Iterator[dict[str, Any]]:
        """Start anew now, and return the `partial` in pieces of one client's factors each."""
        rest = self.partial()
        factors, rest["factors"] = rest["factors"], {}

        def each() -> Iterator[dict[str, Any]]:
            yield rest
            for client_id in [*factors]:
                yield {"factors": {client_id: factors.pop(client_id)}, "sent": {}, "others": None}

        return each()

    def merge(self, partial: Mapping[str, Any]) -> None:
        self._factors |= {name: (weight, own) for name, (weight, own) in partial["factors"].items()}
        self._take_sent(partial["sent"])
        if partial["others"] is not None:
            self._others.merge(partial["others"])

    def _take_sent(self, sent: State) -> None:
        for name in sent.keys() & self._sent.keys():
            if sent[name] is not self._sent[name] and not torch.equal(sent[name], self._sent[name]):
                raise ValueError(
                    f"FlexLoRA puts new factors in the place of those that clients were sent, and two were sent unlike "
                    f"{name}: train all clients of a round from one state, or take HetLoRA"
                )
        self._sent |= sent

    def result(self) -> State:
        found = self._others.result()
        clients = [self._factors[name] for name in sorted(self._factors)]
        for pair in find_pairs(self._sent).pairs:
            a, b = self._sent[pair.a], self._sent[pair.b]
            new_b, new_a = best_factors(*self._stacked(pair, clients), rank=len(a), spare=a)
            found |= {pair.a: new_a - a, pair.b: new_b - b}
        self._factors, self._sent = {}, {}
        return found

    def _stacked(self, pair: LoraPair, clients: list[tuple[float, State]]) -> tuple[Tensor, Tensor]:
        """Return factors, ``(out, sum of ranks)`` and ``(sum of ranks, in)``, whose product is the mean of the products."""
        of_direction = torch.zeros(
            len(self._sent[pair.a]), dtype=torch.float64
        )  # sum of the weights that count for it
        for weight, own in clients:
            of_direction[: None if self._missing == "zero" else pair.rank(own)] += weight
        nobodys = of_direction == 0
        all_b = [self._sent[pair.b][:, nobodys].double()]
        all_a = [self._sent[pair.a][nobodys].double()]
        for weight, own in clients:
            all_b.append(own[pair.b] * (weight / of_direction[: pair.rank(own)]))
            all_a.append(own[pair.a])
        return torch.cat(all_b, dim=1), torch.cat(all_a)
