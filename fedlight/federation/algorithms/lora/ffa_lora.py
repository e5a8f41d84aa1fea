"""FFA-LoRA: A stays at its initial value everywhere, and clients train and send B alone.

Sun et al., "Improving LoRA in Privacy-preserving Federated Learning", ICLR 2024, https://arxiv.org/abs/2403.12313: with
A = A_0 fixed, a layer's addition is linear in B, so averaging B averages the products,

    B <- B + sum c_i (B_i - B)     and     B A_0 + sum c_i (B_i A_0 - B A_0)  =  (B + sum c_i (B_i - B)) A_0

There is no error of the average, and half of the adapter is sent. Under differential privacy, clipping and noise are on B
alone, and noise is never multiplied by noise, unlike in ``(B + n_B) (A + n_A)``.

A is never sent: it follows from the seed of the module or from its folder, like the base. Other trained tensors, such as a
head, are trained and averaged as in FedAvg. The operations of a step are counted as if A were trained.
"""

from collections.abc import Mapping

from torch import Tensor

from fedlight.federation.algorithm import WithLocal
from fedlight.federation.client import Client, State, Visit, Visiting
from fedlight.federation.lora.pairs import factor_of, trained_pairs
from fedlight.federation.protocols import Federation


class FFALoRA(WithLocal):
    """FedAvg of B with A frozen at its initial value and never sent.

    Args:
        weighting: of the clients, as for `Algorithm`.
        local: algorithm such as FedProx, which may change only the clients' gradients; its weighting plays no part.

    Raises:
        ValueError: in ``check``, for a module without a LoRA adapter, with another kind of it, or with an A that is 0.

    Examples:
        >>> import torch
        >>> from fedlight import Client, Visit
        >>> state = {"q.lora_A.default.weight": torch.ones(1, 2), "q.lora_B.default.weight": torch.zeros(2, 1)}
        >>> [*FFALoRA().send(Visit("a", 1), Client("a", 1, 1.0), state)]
        ['q.lora_B.default.weight']
    """

    def check(self, federation: Federation) -> None:
        super().check(federation)
        parameters = dict(federation.module.named_parameters())
        for pair in trained_pairs(federation, "FFALoRA"):
            if not parameters[pair.a].any():
                raise ValueError(
                    f"FFALoRA leaves A as it is, and {pair.a} is 0 in all places, so this layer would learn nothing: start "
                    "from an adapter with another A, such as PEFT's default, or take RoLoRA"
                )

    def send(self, visit: Visit, client: Client, state: State) -> State | None:
        return {name: value for name, value in state.items() if factor_of(name) != "A"}

    def adjust_gradients(
        self, visiting: Visiting, parameters: Mapping[str, Tensor], gradients: dict[str, Tensor]
    ) -> None:
        for name in [name for name in gradients if factor_of(name) == "A"]:
            del gradients[name]  # then neither momentum nor weight decay moves A
        super().adjust_gradients(visiting, parameters, gradients)
