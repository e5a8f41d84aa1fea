"""FedProx: clients are held near the model that they received.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, https://arxiv.org/abs/1812.06127, eq. 2: a client
minimizes ``f_m(w) + mu / 2 * |w - w_received|^2``, so each step's gradient gains ``mu * (w - w_received)``. The paper's
clients may do unequal work; here that is the number of batches in their visits.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedlight.federation.algorithm import Algorithm, Weighting
from fedlight.federation.client import Visiting
from fedlight.federation.protocols import Federation, refuse_odd_steps
from fedlight.support.pokes import add_differences


class FedProx(Algorithm):
    """FedAvg with a proximal term; ``mu = 0`` is FedAvg.

    The term joins the gradient before it is clipped and before the optimizer, also one like AdamW, makes a step of it.

    Args:
        mu: strength of the proximal term, at least 0.
        weighting: of the clients, as for `Algorithm`.

    Raises:
        ValueError: ``mu`` is out of its range; in ``check``, for an optimizer that maximizes or searches along the loss.

    Examples:
        >>> from fedlight import Client, Visit
        >>> prox, received = FedProx(mu=0.5), {"w": torch.tensor([1.0])}
        >>> visiting = prox.start_visit(Visit("a", 1), Client("a", 1, 1.0), received)
        >>> gradient = torch.tensor([10.0])
        >>> prox.adjust_gradients(visiting, {"w": visiting.start["w"] + 4}, {"w": gradient})
        >>> gradient.item()
        12.0
    """

    def __init__(self, mu: float = 0.01, weighting: Weighting = "unbiased") -> None:
        super().__init__(weighting)
        if not 0 <= mu < float("inf"):
            raise ValueError(f"mu={mu} must be at least 0; 0 is FedAvg")
        self.mu = mu

    def check(self, federation: Federation) -> None:
        super().check(federation)
        if self.mu > 0:
            refuse_odd_steps(federation.optimizers, "FedProx")

    @torch.no_grad()
    def adjust_gradients(
        self, visiting: Visiting, parameters: Mapping[str, Tensor], gradients: dict[str, Tensor]
    ) -> None:
        if self.mu == 0:
            return
        received, anchors = visiting.received, visiting.notes
        # A layer that a step leaves out is pulled back from where the steps before have moved it.
        left_out = [name for name in anchors if name in parameters and name not in gradients]
        gradients |= {name: torch.zeros_like(parameters[name]) for name in left_out}
        held = [name for name in gradients if name in received]
        if not held:  # as of an algorithm around this one that has taken out the only gradient
            return
        for name in held:
            if name not in anchors:  # copied to where the parameters are once a visit, not once a step
                anchors[name] = received[name].to(parameters[name])
        of_held = [[each[name] for name in held] for each in (gradients, parameters, anchors)]
        add_differences(self.mu, *of_held)  # eq. 2: the gradient of mu / 2 * |w - w_received|^2
