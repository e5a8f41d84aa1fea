"""Loss and accuracy of selectors with the two orders of a comparison averaged.

A selector that reads two answers one after the other may prefer a position. Wu et al. (FedBis), ICLR 2025,
https://arxiv.org/abs/2407.03038, train on both orders; here the verdict on a comparison is the mean of the log-odds that the
selector gives to the same answer in the two orders, so that a preference for a position cancels. It is half the difference
between the log-odds of A over B in one order and in the other.
"""

from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torchmetrics import Metric

from fedlight.evaluation.judge import judge_both_orders, summarize_both_orders

NAME = "accuracy_both_orders"
APART = (
    "orders='both' compares the two orders of a vote, but a batch has an order alone: set twins_together=true in "
    "PreferenceDataModule and an even eval_batch_size, or set orders='one' in SelectorModule"
)


class BothOrders(Metric):
    """Metric that joins the two orders of comparisons across batches, and across processes under Lightning's strategies."""

    full_state_update = False
    # All of the examples so far; see `fedlight.evaluation.judge.judge_both_orders`.
    orders: list[Tensor]
    log_odds: list[Tensor]
    labels: list[Tensor]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name in ("orders", "log_odds", "labels"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def update(self, orders: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add a batch: ``orders`` and ``labels`` ``(batch,)``, ``logits`` of A and B by each selector ``(batch, U, 2)``."""
        # At least fp32, and fp64 only where the logits are: devices such as Apple's GPUs lack it.
        logits = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
        self.orders.append(orders)
        self.log_odds.append(logits[..., 1] - logits[..., 0])  # [batch, U], of B over A
        self.labels.append(labels)

    def compute(self) -> dict[str, float]:
        """Return the accuracy, and the ends of its 95 % interval over comparisons; nothing without a whole comparison.

        The accuracy is NaN, without an interval, where a verdict is NaN. One comparison alone has no interval.
        """
        parts: list[Any] = [self.orders, self.log_odds, self.labels]
        # After an exchange between processes a state is one tensor.
        states = [torch.cat(part) if isinstance(part, list) else part for part in parts]
        right, comparisons = judge_both_orders(*(state.cpu().numpy() for state in states))
        return {f"{NAME}{end}": value for end, value in summarize_both_orders(right, comparisons).items()}


def average_orders(logits: Tensor, orders: Tensor | None) -> Tensor:
    """Return the logits of A and B, each averaged with that of the same answer in the other order.

    Logits are ``(batch, 2)``, or ``(batch, U, 2)`` of U selectors; ``orders`` are 2c and 2c + 1 for the two orders of
    comparison c, which are neighbours in the batch, ``(batch,)``.

    Raises:
        ValueError: an example is not beside the other order of its comparison, or ``orders`` is None.

    Examples:
        >>> average_orders(torch.tensor([[3.0, 0.0], [2.0, 0.0]]), torch.tensor([4, 5])).tolist()  # A by 3, then A by 2
        [[1.5, 1.0], [1.0, 1.5]]
    """
    if orders is None or len(orders) % 2 or not torch.equal(orders[::2] ^ 1, orders[1::2]):  # 2c ^ 1 = 2c + 1
        raise ValueError(APART)
    swapped = logits.unflatten(0, (-1, 2)).flip(1, -1).flatten(0, 1)  # the other order, with B as A
    return (logits + swapped) / 2


def log_both_orders(metric: BothOrders, module: Any, stage: str) -> None:
    """Log the metric at the end of a pass, as ``stage/accuracy_both_orders`` with its interval.

    A test says where the interval reaches down to one half. Nothing is logged where no batch had ``orders``, or none of
    their comparisons came in both.
    """
    if metric.update_called:  # else torchmetrics warns of an empty metric
        values = metric.compute()
        for name, value in values.items():
            module.log(f"{stage}/{name}", value)
        if stage == "test" and (low := values.get(f"{NAME}_low", 1.0)) <= 0.5:
            rank_zero_info(
                f"warning: the selector is not shown to beat chance: accuracy in both orders {values[NAME]:.3f} "
                f"[{low:.3f}, {values[f'{NAME}_high']:.3f}]; its votes, and what is tuned on them, are worthless"
            )
        metric.reset()
