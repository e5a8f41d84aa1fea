"""What a datamodule's ``setup`` made of its data, in two lines."""

from dataclasses import dataclass

import numpy as np

from fedlight.datamodules.clients.splits import Split
from fedlight.datamodules.federated.rounds import RoundPlan
from fedlight.datamodules.text.tokens import padded_share
from fedlight.federation.client import Visit


@dataclass(frozen=True)
class SetupReport:
    """Sizes after encoding and partitioning; ``str`` gives them in one line.

    Attributes:
        kind: what is counted, "pairs" or "examples".
        split: who has what.
        too_long: how many do not fit and are left out.
        trimmed: token sequences whose prompt lost text.
        padding: share of padding in a batch, each client's data passed through once, batched by length.
        padding_unsorted: the same without sorting by length.
    """

    kind: str
    split: Split
    too_long: int
    trimmed: int
    padding: float
    padding_unsorted: float

    def __str__(self) -> str:
        sizes = np.array([len(own) for own in self.split.train.values()])
        validation = sum(len(own) for own in (self.split.val or {}).values())
        singles = self.split.single_category_clients
        single = "" if singles is None else f", {singles:,} of them with one category only"
        return (
            f"{_count(len(sizes), 'client')} with {sizes.min():,} to {sizes.max():,} {self.kind} (median "
            f"{np.median(sizes):,.0f})"
            f"{single}, {_count(self.split.dropped_clients, 'client')} left out as too small; training {sizes.sum():,}, "
            f"validation {validation:,} {self.kind}; {self.too_long:,} too long and left out, "
            f"{_count(self.trimmed, 'input')} cut; "
            f"padding {self.padding:.1%} of a batch ({self.padding_unsorted:.1%} if not batched by length)"
        )


def _count(number: int, what: str) -> str:
    """So many of them.

    Example:
        >>> _count(1, "client"), _count(1200, "client")
        ('1 client', '1,200 clients')
    """
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def padding_shares(
    clients: dict[str, np.ndarray], lengths: np.ndarray, batch_size: int, seed: int
) -> tuple[float, float]:
    """Share of padding when each client passes once through its data: batched by length, and not.

    Example:
        >>> padding_shares({"u": np.arange(4)}, np.array([1, 5, 1, 5]), batch_size=2, seed=0)[0]
        0.0
    """
    return _padding(clients, lengths, batch_size, seed, lengths), _padding(
        clients, lengths, batch_size, seed, None
    )


def _padding(
    clients: dict[str, np.ndarray], lengths: np.ndarray, batch_size: int, seed: int, by: np.ndarray | None
) -> float:
    plan = RoundPlan(clients, batch_size, seed, by)
    plan.set_visits([Visit(client, plan.num_batches(client)) for client in clients], round_idx=0)
    return padded_share(lengths, list(plan.sampler()))
