"""FedSA-LoRA: clients share A, and each keeps its own B.

Guo et al., "Selective Aggregation for Low-Rank Adaptation in Federated Learning", ICLR 2025,
https://arxiv.org/abs/2410.01463. In round t a sampled client i starts from the server's A and its own B_i, takes
its steps on both, and sends A_i alone:

    A_i, B_i <- steps on F_i(W_0 + s B_i A)  from  (A, B_i)            A <- A + sum c_i (A_i - A)

A learns the clients' common part, B their differences. It is FedPer (`FedRep` with ``together``) with the B of the adapters
for a head.

A client starts from the B of the global model, which is sent to it once and never moves. So a client's own model is the
shared A with its B; metrics of the global model are those of the shared A under an untrained B, which for a new adapter is
the base alone: look at ``ClientAccuracy(own_models=True)``. Other trained tensors, such as a head, are shared like A. A bias
of B belongs to B.
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from fedlight.federation.algorithm import WithLocal
from fedlight.federation.client import OWN_STATE, Client, State, Visit, Visiting, Work
from fedlight.federation.lora.pairs import factor_of, trained_pairs
from fedlight.federation.protocols import Federation


class FedSALoRA(WithLocal):
    """FedAvg of A and of other trained tensors; the B of LoRA adapters stays with the clients.

    Args:
        weighting: of the clients, as for `Algorithm`.
        local: algorithm such as FedProx, which may change only the clients' gradients of shared tensors; its weighting plays
            no part.

    Raises:
        ValueError: in ``check``, for a module without a LoRA adapter, or with another kind of it.

    Examples:
        >>> import torch
        >>> from fedlight import Client, Visit, Work
        >>> state = {"q.lora_A.default.weight": torch.ones(1, 2), "q.lora_B.default.weight": torch.zeros(2, 1)}
        >>> algorithm, client = FedSALoRA(), Client("a", 1, 1.0)
        >>> visiting = algorithm.start_visit(Visit("a", 1), client, state)
        >>> [*algorithm.reply(visiting, state, Work(1, 0.1, 0.5, 1.0))], [*client.memory["own_state"]]
        (['q.lora_A.default.weight'], ['q.lora_B.default.weight'])
    """

    buffers = ("refuse", "local")

    def check(self, federation: Federation) -> None:
        super().check(federation)
        trained_pairs(federation, "FedSALoRA")

    def send(self, visit: Visit, client: Client, state: State) -> State | None:
        kept: State = client.memory.get(OWN_STATE, {})
        return {name: value for name, value in state.items() if name not in kept}

    def start_visit(self, visit: Visit, client: Client, received: State) -> Visiting:
        visiting = super().start_visit(visit, client, received)
        return replace(visiting, start=visiting.start | client.memory.get(OWN_STATE, {}))

    def adjust_gradients(
        self, visiting: Visiting, parameters: Mapping[str, Tensor], gradients: dict[str, Tensor]
    ) -> None:
        # B stays with the client: a term of the local algorithm, as FedProx's, is for shared tensors.
        gradients_of_b = {name: gradients.pop(name) for name in [*gradients] if factor_of(name) == "B"}
        super().adjust_gradients(visiting, parameters, gradients)
        gradients |= gradients_of_b

    def reply(self, visiting: Visiting, trained: State, work: Work) -> State:
        kept = {name: value for name, value in trained.items() if factor_of(name) == "B"}
        visiting.client.memory[OWN_STATE] = kept
        return {name: value for name, value in trained.items() if name not in kept}
