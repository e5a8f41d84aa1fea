"""Error of a round's average of LoRA adapters: how far the server's product B A is from the mean of the clients' products.

With the clients' factors A_i and B_i as they reached the server, the weights c_i of the algorithm (`ProductSums.terms`), and
the server's new factors A and B before a server optimizer changes their step,

    fed/product_error = sqrt(sum over layers s^2 |B A - mean of B_i A_i|^2 / sum over layers s^2 |mean of B_i A_i|^2)

in the Frobenius norm, with s the layer's scaling, PEFT's ``alpha / r``: it cancels where all layers have the same one, and
``alpha_pattern`` or ``rank_pattern`` give them others. Layers that are not PEFT's count alike.

Averaging both factors apart has an error that grows with the number of local steps and the unlikeness of clients; averages
of one factor with the other one fixed have none beyond rounding. A robust or private aggregation adds its own distance from
the mean, noise included.

It is left out where it is not defined: without a plain LoRA pair, where a client keeps a factor that the server does not
know or sends one that it has not received in the visit, and under an algorithm whose average is no weighted sum.
"""

import logging
import math
from typing import Literal

from torch import Tensor, nn

from fedlight.federation.aggregation import Aggregation, WeightedSum
from fedlight.federation.algorithm import Algorithm
from fedlight.federation.lora.pairs import LoraPair, find_pairs
from fedlight.federation.lora.products import ProductSums, squared_distance
from fedlight.federation.protocols import Federation
from fedlight.federation.state import State

logger = logging.getLogger("fedlight")
Setting = bool | Literal["auto"]
LIMIT_MIB = 256
"""With ``auto``, most memory of the factors of a round's clients. It is also the default of the clients' memories."""


class ProductError:
    """``fed/product_error`` of the rounds of a run.

    Args:
        setting: ``auto`` for every round whose uploads take at most ``LIMIT_MIB``, since they are all kept until the round
            is over, by each of several processes; true for every round; false for none.
    """

    def __init__(self, setting: Setting = "auto") -> None:
        self._setting = setting
        self._sums: ProductSums | None = None
        self._pairs: list[LoraPair] = []
        self._scalings: list[float] = []
        self._said: set[str] = set()

    def watch(
        self, aggregation: Aggregation, algorithm: Algorithm, federation: Federation, num_clients: int
    ) -> Aggregation:
        """Return an aggregation of the same result that keeps what the metric needs, or the same one without a metric.

        Args:
            aggregation: of the round that begins.
            algorithm: its own aggregation says with which coefficient a client counts.
            federation: the run, with the state from which the round begins.
            num_clients: clients of the round.
        """
        self._sums = None
        if self._setting is False:
            return aggregation
        self._pairs, others = find_pairs(federation.state, federation.module)
        if not self._pairs:
            return aggregation
        self._scalings = [_scaling(pair, federation.module) for pair in self._pairs]
        if others:
            name, why = next(iter(others.items()))
            self._say(
                f"fed/product_error is of plain LoRA pairs alone, without {len(others)} tensors such as {name}: {why}"
            )
        if isinstance(aggregation, ProductSums):
            self._sums = aggregation
            return aggregation
        mib = num_clients * 4 * sum(_numbers(federation.state, pair) for pair in self._pairs) / 2**20
        if self._setting == "auto" and mib > LIMIT_MIB:
            self._say(
                f"fed/product_error is left out, as the adapters of {num_clients} clients take {mib:,.0f} MiB until their "
                f"round is over, and product_error=auto means at most {LIMIT_MIB}: set it to true to have it"
            )
            return aggregation
        mean = algorithm.aggregation(len(federation.clients)) if federation.robust else aggregation
        mean = getattr(
            mean, "mean", mean
        )  # of an aggregation that knows with which coefficients clients count
        if not isinstance(mean, WeightedSum):
            return aggregation
        self._sums = ProductSums(aggregation, mean, self._pairs)
        return self._sums

    def metrics(self, state: State, movement: State) -> dict[str, float]:
        """Return ``product_error`` of a round that is over; empty where it is not defined.

        Args:
            state: parameters from which the round began.
            movement: combined movement that the server's optimizer gets.
        """
        sums, self._sums = self._sums, None
        if sums is None or not sums.is_known:
            return {}
        distance = norm = 0.0
        found = False
        largest = max(self._scalings) or 1.0
        for pair, scaling in zip(self._pairs, self._scalings, strict=True):
            terms = sums.terms(pair, state)
            if terms is None:
                return {}
            if terms:
                found = True
                b, a = (_moved(state, movement, name) for name in (pair.b, pair.a))
                weight = (scaling / largest) ** 2
                of_distance, of_norm = squared_distance(terms, b, a)
                distance, norm = distance + weight * of_distance, norm + weight * of_norm
        if not found or (norm == 0 and distance > 0):
            return {}
        return {"product_error": math.sqrt(distance / norm) if norm else 0.0}

    def _say(self, text: str) -> None:
        """Log a warning once in a run."""
        if text not in self._said:
            self._said.add(text)
            logger.warning(text)


def _numbers(state: State, pair: LoraPair) -> int:
    return state[pair.a].numel() + state[pair.b].numel()


def _scaling(pair: LoraPair, module: nn.Module) -> float:
    """Return what a PEFT layer multiplies the product of a pair with; 1 for a layer of another kind."""
    scalings = getattr(module.get_submodule(pair.layer), "scaling", None)
    return abs(float(scalings.get(pair.adapter, 1.0))) if isinstance(scalings, dict) else 1.0


def _moved(state: State, movement: State, name: str) -> Tensor:
    value = state[name].double()
    return value + movement[name] if name in movement else value
