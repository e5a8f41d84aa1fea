"""FewFedWeight with weights of our own: clients train on their own and on pseudo-labelled data, and count by their loss.

Dong et al., "FewFedWeight: Few-shot Federated Learning Framework across Multiple NLP Tasks", 2022,
https://arxiv.org/abs/2212.08354. From its abstract: each round the global model makes pseudo data for the clients, a client
trains on these, weighted by their energy, beside its own, and the server averages the clients' models with weights that
follow their performance. The data are those of `SyntheticInstructionDataModule` with the synthesis `PseudoResponses`, where
the weights of pseudo examples are made.

**Neither kind of weight is the paper's.** Its equations were not at hand, and FewFedPIT, which compares itself with this
method, gives none. So results of this class do not reproduce a row of either paper; tables name it "FewFedWeight (our
weights)".

Ours: a client trains one adapter on both kinds of examples in one visit, as in FedMIT; its performance is the mean training
loss of its visit, and its weight ``p_m * exp(-loss)`` over the sum of these weights in the round, with ``p_m`` its share of
the clients' own examples. So clients of equal loss count as in FedAvg with ``weighting="normalized"``. The loss is one
number more that a client sends; its four bytes are not counted.
"""

import math
from typing import Literal

from fedlight.federation.algorithm import Weighting
from fedlight.federation.algorithms.self_made.fedmit import FedMIT
from fedlight.federation.client import State, Update, Visiting, Work

MOST_LOSS = 100.0
"""A higher loss counts as this one: its weight would be too small to divide by."""


class FewFedWeight(FedMIT):
    """FedMIT with weights for examples, which come with the data, and for clients; both are ours, not Dong et al.'s.

    Args:
        weighting: ``performance``: see above; or one of `Algorithm`, which ignore losses. On a private wire take one of
            these: nothing hides the loss.

    Raises:
        ValueError: another weighting; before the first round, for data that cannot make candidates.

    Examples:
        >>> import torch
        >>> from fedlight import Client, Visit, Work
        >>> from fedlight.federation.algorithm import aggregation_of
        >>> algorithm = FewFedWeight()
        >>> mean = aggregation_of(algorithm, num_clients=10)
        >>> for name, loss in (("a", 0.0), ("b", math.log(3))):
        ...     visiting = algorithm.start_visit(Visit(name, 1), Client(name, 5, 0.5), {})
        ...     movement = {"w": torch.tensor([8.0 if name == "a" else 0.0])}
        ...     mean.add(algorithm.finish_visit(visiting, movement, Work(1, 0.1, mean_loss=loss, seconds=1.0)))
        >>> round(mean.result()["w"].item(), 4)  # 1 : 1/3
        6.0
    """

    def __init__(self, weighting: Weighting | Literal["performance"] = "performance") -> None:
        self.by_performance = weighting == "performance"
        super().__init__("normalized" if weighting == "performance" else weighting)

    def finish_visit(self, visiting: Visiting, movement: State, work: Work) -> Update | None:
        if not self.by_performance:
            return super().finish_visit(visiting, movement, work)
        if work.mean_loss is None:
            raise ValueError(
                "FewFedWeight needs the loss that training_step returns: return it, or set weighting=normalized"
            )
        client = visiting.client
        # In this order NaN stays NaN, which is refused.
        loss = max(min(work.mean_loss, MOST_LOSS), -MOST_LOSS)
        return Update(client.id, movement, client.share * math.exp(-loss))
