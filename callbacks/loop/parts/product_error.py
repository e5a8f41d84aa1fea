"""Error of a round's average of LoRA adapters: how far the server's product B A is from the mean of the clients' products.

With the clients' factors A_i and B_i as they reached the server, the weights c_i of the algorithm (`ProductSums.terms`), and
the server's new factors A and B before a server optimizer changes their step,

    fed/product_error = sqrt(sum over layers s^2 |B A - mean of B_i A_i|^2 / sum over layers s^2 |mean of B_i A_i|^2)

in the Frobenius norm, with s the layer's scaling, PEFT's ``alpha / r``. Layers that are not PEFT's count alike.

Averaging both factors apart has an error that grows with the number of local steps and the unlikeness of clients; averages
of one factor with the other one fixed have none beyond rounding. A robust or private aggregation adds its own distance from
the mean, noise included.

It is left out where it is not defined: without a plain LoRA pair, where a client keeps a factor that the server does not
know or sends one that it has not received in the visit, and under an algorithm whose average is no weighted sum.
"""

import logging
import math

from torch import Tensor, nn

from fedlight.callbacks.loop.parts.part import Part
from fedlight.callbacks.loop.run import Run
from fedlight.callbacks.loop.visits.round import OpenRound
from fedlight.federation.algorithm import Aggregation, WeightedSum, aggregation_of
from fedlight.federation.client import State
from fedlight.federation.lora.pairs import LoraPair, find_pairs
from fedlight.federation.lora.products import ProductSums, squared_distance

logger = logging.getLogger("fedlight")


class ProductError(Part):
    """Part that logs ``fed/product_error`` of each round: ``FederatedLoop(parts=[ProductError()])``.

    The uploads of a round are kept until it is over, by each of several processes.
    """

    def __init__(self) -> None:
        self._sums: ProductSums | None = None
        self._pairs: list[LoraPair] = []
        self._scalings: list[float] = []
        self._said: set[str] = set()

    def check(self, run: Run) -> None:
        """Raise ValueError for buffered rounds."""
        if run.planned_by_arrival:
            raise ValueError(
                "ProductError compares the server's product with those of clients that began at its model, and in buffered "
                "rounds they begin at different ones: leave it out of parts, or leave fleet.buffered out"
            )

    def aggregation(self, run: Run, inner: Aggregation, num_clients: int) -> Aggregation:
        """Return an aggregation of the same result that keeps the products for the metric; ``inner`` without a metric."""
        self._sums = None
        if not any("lora_" in name for name in run.state):
            return inner
        self._pairs, others = find_pairs(run.state, run.module)
        if not self._pairs:
            return inner
        self._scalings = [_scaling(pair, run.module) for pair in self._pairs]
        if others:
            name, reason = next(iter(others.items()))
            self._say(
                f"fed/product_error is of plain LoRA pairs alone, without {len(others)} tensors such as {name}: {reason}"
            )
        if isinstance(inner, ProductSums):
            self._sums = inner
            return inner
        # A robust aggregation has no coefficients, so those of the algorithm count.
        mean = aggregation_of(run.algorithm, len(run.clients)) if run.robust else inner
        # The weighted mean inside an aggregation knows the clients' coefficients.
        mean = getattr(mean, "mean", mean)
        if not isinstance(mean, WeightedSum):
            return inner
        self._sums = ProductSums(inner, mean, self._pairs)
        return self._sums

    def finish_round(self, run: Run, round: OpenRound, movement: State) -> dict[str, float]:
        """Return ``product_error`` of a round that is over; empty where it is not defined."""
        state = round.state
        sums, self._sums = self._sums, None
        if sums is None or not sums.is_known:
            return {}
        distance = norm = 0.0
        has_terms = False
        largest = max(self._scalings) or 1.0
        for pair, scaling in zip(self._pairs, self._scalings, strict=True):
            terms = sums.terms(pair, state)
            if terms is None:
                return {}
            if terms:
                has_terms = True
                b, a = (_moved(state, movement, name) for name in (pair.b, pair.a))
                weight = (scaling / largest) ** 2  # 1 unless alpha_pattern or rank_pattern differ by layer
                of_distance, of_norm = squared_distance(terms, b, a)
                distance, norm = distance + weight * of_distance, norm + weight * of_norm
        if not has_terms or (norm == 0 and distance > 0):  # the ratio is not defined
            return {}
        return {"product_error": math.sqrt(distance / norm) if norm else 0.0}

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            logger.warning(text)


def _scaling(pair: LoraPair, module: nn.Module) -> float:
    """Return the factor of a pair's product in a PEFT layer; 1 for a layer of another kind."""
    scalings = getattr(module.get_submodule(pair.layer), "scaling", None)
    return abs(float(scalings.get(pair.adapter, 1.0))) if isinstance(scalings, dict) else 1.0


def _moved(state: State, movement: State, name: str) -> Tensor:
    value = state[name].double()
    return value + movement[name] if name in movement else value
