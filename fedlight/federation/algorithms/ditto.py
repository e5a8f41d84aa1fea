"""Ditto: beside the global model each client trains a personal model, held near the global one.

Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021,
https://arxiv.org/abs/2012.04221, Algorithm 1. In round t a sampled client k receives w^t and

    1. trains the global model from w^t, as FedAvg or another local algorithm does, and sends its movement
    2. trains its own model:  v_k <- v_k - lr * (grad F_k(v_k) + lambda * (v_k - w^t)),
       which minimizes eq. 2,  F_k(v) + lambda / 2 * |v - w^t|^2

v_k stays with the client between rounds; it starts from the w^t of the client's first visit. With lambda = 0 the own models
are those of local training alone; the larger lambda, the nearer they stay to w^t. In the paper v_k takes s steps in a round;
here s is ``personal_epochs`` times the steps of the global part. As in the paper's code both parts see the same batches.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from fedlight.federation.algorithm import Algorithm, Weighting, WithLocal
from fedlight.federation.algorithms.fedprox import FedProx
from fedlight.federation.client import OWN_STATE, Client, State, Update, Visit, Visiting, Work
from fedlight.federation.protocols import Federation, NumBatches
from fedlight.support.checks import refuse_below

PERSONAL = "personal"


class Ditto(WithLocal):
    """FedAvg, and a personal model of each client with a proximal term to the global one.

    A client has two visits in a round; in ``visits.csv`` the second has the split ``personal``.

    Args:
        lam: lambda, strength of the proximal term, at least 0.
        personal_epochs: length of the personal visit, in lengths of the global one, at least 1.
        weighting: of the clients in the global model, as for `Algorithm`.
        local: algorithm of the global visit, such as FedProx, which may change only the clients' gradients; its weighting
            plays no part.

    Raises:
        ValueError: a setting is out of range; in ``check``, for an optimizer that maximizes or searches along the loss.
    """

    buffers = ("refuse",)  # those of the global visit would reach the personal one

    def __init__(
        self,
        lam: float = 0.1,
        personal_epochs: int = 1,
        weighting: Weighting = "unbiased",
        local: Algorithm | None = None,
    ) -> None:
        super().__init__(weighting, local)
        if not 0 <= lam < float("inf"):
            raise ValueError(f"lam={lam} must be at least 0; 0 is local training alone")
        refuse_below(1, personal_epochs=personal_epochs)
        self.lam = lam
        self.personal_epochs = personal_epochs
        self._towards_received = FedProx(mu=lam)  # eq. 2 has the term of FedProx

    # The server: the global part alone concerns it

    def check(self, federation: Federation) -> None:
        super().check(federation)
        self._towards_received.check(federation)

    def plan(self, round_idx: int, cohort: Sequence[Client], num_batches: NumBatches) -> list[Visit]:
        return [
            visit
            for client in cohort
            for visit in (
                Visit(client.id, num_batches(client.id)),
                Visit(client.id, self.personal_epochs * num_batches(client.id), part=PERSONAL),
            )
        ]

    def send(self, visit: Visit, client: Client, state: State) -> State | None:
        return None if visit.part == PERSONAL else state  # the client still has w^t

    def finish_visit(self, visiting: Visiting, movement: State, work: Work) -> Update | None:
        return None if visiting.visit.part == PERSONAL else super().finish_visit(visiting, movement, work)

    # The client: a global visit, then a personal one

    def start_visit(self, visit: Visit, client: Client, received: State) -> Visiting:
        if visit.part != PERSONAL:
            return super().start_visit(visit, client, received)
        kept: State = client.memory.get(OWN_STATE, {})  # v_k; it starts from w^t
        return Visiting(visit, client, received, start=received | kept)

    def adjust_gradients(
        self, visiting: Visiting, parameters: Mapping[str, Tensor], gradients: dict[str, Tensor]
    ) -> None:
        rule = self._towards_received if visiting.visit.part == PERSONAL else self.local
        rule.adjust_gradients(visiting, parameters, gradients)

    def reply(self, visiting: Visiting, trained: State, work: Work) -> State:
        if visiting.visit.part != PERSONAL:
            return trained
        visiting.client.memory[OWN_STATE] = trained  # v_k never leaves the client
        return {}
