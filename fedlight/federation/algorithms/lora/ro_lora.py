"""RoLoRA: in turns, a round trains B with A fixed and the next one A with B fixed.

Chen et al., "Robust Federated Finetuning of LLMs via Alternating Optimization of LoRA", NeurIPS 2025,
https://arxiv.org/abs/2502.01755. With c_i the weights of the sampled clients,

    rounds 1, 3, 5, ...   A fixed:  B <- B + sum c_i (B_i - B)     so  B A  moves by  sum c_i (B_i A - B A)
    rounds 2, 4, 6, ...   B fixed:  A <- A + sum c_i (A_i - A)     so  B A  moves by  sum c_i (B A_i - B A)

Each average is one of the products, as in FFA-LoRA, but A learns as well.

A client sends back the factor that it has trained, half of the adapter. The server sends both, since a client that was not
in the round before has neither; the paper's clients take part in every round, and are sent the changed factor. Other trained
tensors, such as a head, are trained and averaged in every round. A bias of B belongs to B.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from fedlight.federation.algorithm import WithLocal
from fedlight.federation.client import Client, State, Visit, Visiting, Work
from fedlight.federation.lora.pairs import factor_of, trained_pairs
from fedlight.federation.protocols import Federation, NumBatches


class RoLoRA(WithLocal):
    """FedAvg of B in every other round, from the first on, and of A in the others.

    In ``visits.csv`` a visit has the split ``B`` or ``A``, the factor that it trains.

    Args:
        weighting: of the clients, as for `Algorithm`.
        local: algorithm such as FedProx, which may change only the clients' gradients; its weighting plays no part.

    Raises:
        ValueError: in ``check``, for a module without a LoRA adapter, or with another kind of it.

    Examples:
        >>> from fedlight import Client
        >>> [RoLoRA().plan(round_idx, [Client("a", 1, 1.0)], lambda client: 3)[0].part for round_idx in range(3)]
        ['B', 'A', 'B']
    """

    def check(self, federation: Federation) -> None:
        super().check(federation)
        trained_pairs(federation, "RoLoRA")

    def plan(self, round_idx: int, cohort: Sequence[Client], num_batches: NumBatches) -> list[Visit]:
        factor = "A" if round_idx % 2 else "B"  # B first: while a new adapter's B is 0, A has no gradient
        return [replace(visit, part=factor) for visit in super().plan(round_idx, cohort, num_batches)]

    def adjust_gradients(
        self, visiting: Visiting, parameters: Mapping[str, Tensor], gradients: dict[str, Tensor]
    ) -> None:
        for name in [name for name in gradients if _is_fixed(name, visiting.visit)]:
            del gradients[name]  # then neither momentum nor weight decay moves it
        super().adjust_gradients(visiting, parameters, gradients)

    def reply(self, visiting: Visiting, trained: State, work: Work) -> State:
        return {name: value for name, value in trained.items() if not _is_fixed(name, visiting.visit)}


def _is_fixed(name: str, visit: Visit) -> bool:
    """Return whether a tensor is of the factor that the visit does not train."""
    return factor_of(name) not in (None, visit.part)
