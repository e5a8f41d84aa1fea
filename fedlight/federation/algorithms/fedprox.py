"""FedProx: clients are held near the model that they received.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, https://arxiv.org/abs/1812.06127, eq. 2: a client
minimizes ``f_m(w) + mu / 2 * |w - w_received|^2``, so each step's gradient gains ``mu * (w - w_received)``. The paper's
clients may do unequal work; here that is the number of batches in their visits.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedlight.federation.algorithm import Algorithm, Weighting
from fedlight.federation.client import Client, Visit
from fedlight.federation.federation import Federation, refuse_odd_steps
from fedlight.federation.state import State


class FedProx(Algorithm):
    """FedAvg with a proximal term; ``mu = 0`` is FedAvg.

    The term joins the gradient before it is clipped and before the optimizer, also one like AdamW, makes a step of it.

    Args:
        mu: strength of the proximal term, at least 0.
        weighting: of the clients, as for :class:`~fedlight.federation.algorithm.Algorithm`.

    Raises:
        ValueError: ``mu`` is not a number of at least 0; in ``check``, for an optimizer that maximizes or searches along the
            loss.

    Example:
        >>> prox, client = FedProx(mu=0.5), Client("a", 1, 1.0)
        >>> received = {"w": torch.tensor([1.0])}
        >>> w = nn.Parameter(prox.start_visit(Visit("a", 1), client, received, nn.Module())["w"] + 4)
        >>> w.grad = torch.tensor([10.0])
        >>> prox.adjust_gradients(client, received, {"w": w})
        >>> w.grad.item()
        12.0
    """

    def __init__(self, mu: float = 0.01, weighting: Weighting = "unbiased") -> None:
        super().__init__(weighting)
        if not 0 <= mu < float("inf"):
            raise ValueError(f"federated.algorithm.mu={mu} must be at least 0; 0 is FedAvg")
        self.mu = mu
        self._anchors: State = {}

    def check(self, federation: Federation) -> None:
        super().check(federation)
        if self.mu > 0:
            refuse_odd_steps(federation.optimizers, "FedProx")

    def start_visit(self, visit: Visit, client: Client, received: State, module: nn.Module) -> State:
        self._anchors = {}
        return received

    @torch.no_grad()
    def adjust_gradients(self, client: Client, received: State, parameters: Mapping[str, Tensor]) -> None:
        if self.mu == 0:
            return
        held = [n for n in parameters if n in received]
        for name in held:
            if name not in self._anchors:  # copied to where the parameters are once a visit, not once a step
                self._anchors[name] = received[name].to(parameters[name])
        moving = [n for n in held if parameters[n].grad is not None]
        gradients = [g for n in moving if (g := parameters[n].grad) is not None]
        distances = torch._foreach_sub([parameters[n] for n in moving], [self._anchors[n] for n in moving])
        torch._foreach_add_(gradients, distances, alpha=self.mu)
