"""FewFedPIT: clients with few examples make more of them, train on both apart, and send a mix of the two models.

Zhang et al., "FewFedPIT: Towards Privacy-preserving and Few-shot Federated Instruction Tuning", 2024,
https://arxiv.org/abs/2403.06131. One round at a client, from the received global adapter g:

    1. g makes candidates from the client's own examples (section 3.3)
    2. private:  from g, training on the client's own examples (section 3.4)
    3. the private model scores the candidates and the best are kept (section 3.3)
    4. public:   from g, with a fresh optimizer, training on those that are kept (section 3.4)
    5. upload    beta * private + (1 - beta) * public (section 3.4)

beta = 1 is FedAvg ("FedIT"), bit for bit. The private adapter exists for these two visits only: it is in no memory and no
checkpoint, and no synthetic example is sent. The datamodule makes and scores the candidates.

Left open by the paper: where no candidate is left, there is nothing public to mix in, and g takes the place of the public
adapter, so that no more than beta of the private movement leaves. ``scorer="global"`` has g choose, before the round; with
it and beta = 0 a client's own examples are not trained on at all. With beta = 0 a client without candidates sends nothing.

On devices, candidates are made and scored on the base of the client's device. That takes no time on the virtual clock, and
its memory is not held against the device's.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fedlight.federation.algorithm import Algorithm, Weighting
from fedlight.federation.algorithms.self_made.candidates import SYNTHETIC, Candidates
from fedlight.federation.client import Client, State, Update, Visit, Visiting, Work
from fedlight.federation.protocols import Federation, NumBatches

PRIVATE = "train"


class FewFedPIT(Algorithm):
    """Federated averaging of adapters that mix the results of a client's private and public visits.

    Args:
        beta: share of the private adapter in the upload, in [0, 1]; 1 is FedAvg.
        scorer: which model chooses among the candidates: the client's ``private`` one (the paper), or the ``global`` one.
        weighting: of the clients, as for `Algorithm`.

    Raises:
        ValueError: a setting is out of range; before the first round, for data that cannot make candidates, unless beta = 1.
    """

    def __init__(
        self,
        beta: float = 0.5,
        scorer: Literal["private", "global"] = "private",
        weighting: Weighting = "unbiased",
    ) -> None:
        super().__init__(weighting)
        if not 0 <= beta <= 1:
            raise ValueError(f"beta={beta} must be in [0, 1]; 1 is FedAvg")
        self.beta = beta
        if beta < 1:  # those of the private visit would reach the public one, or leave the client unmixed
            self.buffers = ("refuse",)
        self.scorer = scorer
        self._candidates = Candidates()
        self._splits: dict[str, list[str]] = {}

    # The server

    def check_settings(self, federation: Federation) -> None:
        if self.beta < 1:
            self._candidates.made_in(federation, type(self).__name__)

    def prepare_round(self, round_idx: int, cohort: Sequence[Client], federation: Federation) -> None:
        if self.beta < 1:
            self._candidates.make_by_global_model(round_idx, cohort, federation, self.scorer == "global")

    def plan(self, round_idx: int, cohort: Sequence[Client], num_batches: NumBatches) -> list[Visit]:
        self._splits = {client.id: self._splits_of(client) for client in cohort}
        return [
            Visit(client_id, num_batches(client_id, split), split)
            for client_id, splits in self._splits.items()
            for split in splits
        ]

    def send(self, visit: Visit, client: Client, state: State) -> State | None:
        first, *_ = self._splits.get(visit.client_id, [visit.split])
        return state if visit.split == first else None

    def finish_visit(self, visiting: Visiting, movement: State, work: Work) -> Update | None:
        return super().finish_visit(visiting, movement, work) if self._is_last(visiting.visit) else None

    def partial(self) -> dict[str, Any]:
        return self._candidates.partial() if self.beta < 1 else {}

    def merge(self, partial: Mapping[str, Any]) -> None:
        if self.beta < 1:
            self._candidates.merge(partial)

    def finish_round(self, movement: State) -> State:
        if self.beta < 1:
            self._candidates.log()
        return super().finish_round(movement)

    # The client: a private visit, then a public one that starts anew

    def reply(self, visiting: Visiting, trained: State, work: Work) -> State:
        if self.beta == 1:
            return trained
        if not self._is_last(visiting.visit):  # nothing leaves the client
            # Now: the first batch of the next visit is fetched before that visit starts, and has the chosen examples.
            if self.scorer == "private" and not visiting.shapes_only:
                self._candidates.choose(visiting.client)
            visiting.notes["private"] = trained if self.beta > 0 else {}
            return {}
        if visiting.visit.split == PRIVATE:  # no candidate is left
            return mixed(trained, visiting.received, self.beta)
        private = visiting.before.notes["private"] if visiting.before else {}
        return mixed(private, trained, self.beta)

    # Which visits a client has

    def _splits_of(self, client: Client) -> list[str]:
        """Return the splits of the client's visits, without a visit that has no effect on its reply."""
        left = self._candidates.left.get(client.id)
        if left is None:  # beta = 1; or the client is absent, or the plan is not trained
            return [PRIVATE]
        trains_private = self.beta > 0 or (self.scorer == "private" and left > 0)
        return [PRIVATE] * trains_private + [SYNTHETIC] * (left > 0)

    def _is_last(self, visit: Visit) -> bool:
        return self._splits.get(visit.client_id, [visit.split])[-1] == visit.split


def mixed(private: State, public: State, beta: float) -> State:
    """Return ``beta * private + (1 - beta) * public`` in fp64, rounded to fp32 once; with beta = 0 nothing private is read.

    Examples:
        >>> import torch
        >>> mixed({"w": torch.tensor([5.0])}, {"w": torch.tensor([1.0])}, beta=0.25)["w"].item()
        2.0
    """
    if beta == 0:
        return public
    return {
        name: (beta * private[name].double() + (1 - beta) * value.double()).float()
        for name, value in public.items()
    }
