"""Report of a datamodule's ``setup`` on its data."""

from dataclasses import dataclass

import numpy as np

from fedlight.datamodules.clients.splits import ClientSplit
from fedlight.datamodules.federated.rounds import RoundPlan
from fedlight.datamodules.text.tokens import padded_share
from fedlight.federation.client import Visit
from fedlight.support.words import count_noun


@dataclass(frozen=True)
class SetupReport:
    """Sizes after encoding and partitioning; ``str`` gives them in one line."""

    kind: str  # noun of the examples, "pairs" or "examples"
    split: ClientSplit  # examples of each client
    too_long: int  # dropped examples that do not fit
    trimmed: int  # token sequences with a truncated prompt
    padding: float  # share of padding in one pass over each client's data, batched by length
    padding_unsorted: float  # the same share without sorting by length

    def __str__(self) -> str:
        sizes = np.array([len(indices) for indices in self.split.train.values()])
        val = self.split.val or {}
        validation = sum(map(len, val.values()))
        both = sum(len(np.intersect1d(indices, self.split.train[client])) for client, indices in val.items())
        trained = f" ({both:,} also trained on, of clients with one alone)" if both else ""
        singles = self.split.single_category_clients
        single = "" if singles is None else f", {singles:,} of them with one category only"
        return (
            f"{count_noun(len(sizes), 'client')} with {sizes.min():,} to {sizes.max():,} {self.kind} (median "
            f"{np.median(sizes):,.0f})"
            f"{single}, {count_noun(self.split.dropped_clients, 'client')} left out as too small; training {sizes.sum():,}, "
            f"validation {validation:,} {self.kind}{trained}; {self.too_long:,} too long and left out, "
            f"{count_noun(self.trimmed, 'input')} cut; "
            f"padding {self.padding:.1%} of a batch ({self.padding_unsorted:.1%} if not batched by length)"
        )


def padding_shares(
    clients: dict[str, np.ndarray], lengths: np.ndarray, batch_size: int, seed: int
) -> tuple[float, float]:
    """Return the share of padding in one pass over each client's data: batched by length, and in random order.

    Examples:
        >>> padding_shares({"u": np.arange(4)}, np.array([1, 5, 1, 5]), batch_size=2, seed=0)[0]
        0.0
    """

    def measure(sort_by: np.ndarray | None) -> float:
        plan = RoundPlan(clients, batch_size, seed, sort_by)
        visits = (Visit(client, plan.num_batches(client), whole_passes=True) for client in clients)
        return padded_share(
            lengths, [batch for visit in visits for batch in plan.batches(visit, round_idx=0)]
        )

    return measure(lengths), measure(None)  # None: batches in random order
