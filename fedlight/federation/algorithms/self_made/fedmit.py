"""FedMIT: FedAvg whose clients train one adapter on their own examples and on examples that they made, mixed.

A baseline of FewFedPIT, which trains them apart: Zhang et al., "FewFedPIT: Towards Privacy-preserving and Few-shot Federated
Instruction Tuning", 2024, https://arxiv.org/abs/2403.06131. The global model makes its candidates and, since no client has
its own model here, also chooses them. A client's own examples alone count for its weight.
"""

from collections.abc import Sequence

from fedlight.federation.algorithm import Algorithm, Weighting
from fedlight.federation.algorithms.self_made.candidates import MIXED, Candidates
from fedlight.federation.client import Client, State, Visit
from fedlight.federation.protocols import Federation, NumBatches


class FedMIT(Algorithm):
    """FedAvg on mixed data; a client without candidates trains on its own examples.

    Args:
        weighting: of the clients, as for `Algorithm`.

    Raises:
        ValueError: before the first round, for data that cannot make candidates.
    """

    def __init__(self, weighting: Weighting = "unbiased") -> None:
        super().__init__(weighting)
        self._candidates = Candidates()

    def check_settings(self, federation: Federation) -> None:
        self._candidates.made_in(federation, type(self).__name__)

    def prepare_round(self, round_idx: int, cohort: Sequence[Client], federation: Federation) -> None:
        self._candidates.make_by_global_model(round_idx, cohort, federation, choose=True)

    def plan(self, round_idx: int, cohort: Sequence[Client], num_batches: NumBatches) -> list[Visit]:
        splits = {client.id: MIXED if self._candidates.left.get(client.id) else "train" for client in cohort}
        return [Visit(name, num_batches(name, split), split) for name, split in splits.items()]

    def finish_round(self, movement: State) -> State:
        self._candidates.log()
        return super().finish_round(movement)
