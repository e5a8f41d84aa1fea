"""Local training alone on mixed data: each client's own model makes examples, and it trains on these and its own, mixed.

A baseline of FewFedPIT ("LocIT+SG"): Zhang et al., "FewFedPIT: Towards Privacy-preserving and Few-shot Federated Instruction
Tuning", 2024, https://arxiv.org/abs/2403.06131. It says what making examples is worth without a federation. The client's own
model also chooses among its candidates.
"""

from collections.abc import Sequence

from fedlight.federation.algorithms.local_only import LocalOnly
from fedlight.federation.algorithms.self_made.fedmit import FedMIT
from fedlight.federation.client import Client
from fedlight.federation.protocols import Federation


class LocalSelfGeneration(LocalOnly, FedMIT):
    """A client goes on with its own model, on its own examples and those which this model made; nothing is sent back.

    Raises:
        ValueError: before the first round, for data that cannot make candidates.
    """

    def prepare_round(self, round_idx: int, cohort: Sequence[Client], federation: Federation) -> None:
        self._candidates.make_by_own_models(round_idx, cohort, federation)
