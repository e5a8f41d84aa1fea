"""Accuracy of selectors with the two orders of a comparison averaged.

A selector that reads two answers one after the other may prefer a position. Wu et al. (FedBis), ICLR 2025,
https://arxiv.org/abs/2407.03038, train on both orders; here the verdict on a comparison is the mean of the log-odds that the
selector gives to the same answer in the two orders, so that a preference for a position cancels.
"""

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from fedlight.evaluation.bootstrap import bootstrap_interval

NAME = "accuracy_both_orders"


def judge_both_orders(
    orders: np.ndarray, log_odds: np.ndarray, labels: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return which examples are right when each selector's verdict is the mean of both orders.

    Args:
        orders: order of each example, ``(examples,)``: 2c and 2c + 1 are the two orders of comparison c.
        log_odds: log-probability of B less that of A by each of U selectors, an odd number, ``(examples, U)``.
        labels: 0 where A is better and 1 where B is, ``(examples,)``.

    Returns:
        For the examples whose other order is among them: 1 where the majority of the selectors is right, 0 where it is
        wrong and 0.5 where it is undecided, ``(judged,)``; and their comparisons c, ``(judged,)``.

    Examples:
        >>> right, comparisons = judge_both_orders(np.array([0, 1, 4]), np.array([[0.5], [2], [1]]), np.array([0, 1, 1]))
        >>> right.tolist(), comparisons.tolist()  # B is preferred by 0.5 shown second, and by -2 shown first
        ([1.0, 1.0], [0, 0])
    """
    known, first = np.unique(orders, return_index=True)
    place = np.searchsorted(known, orders ^ 1).clip(max=max(len(known) - 1, 0))
    judged = np.flatnonzero(known[place] == orders ^ 1)
    both = log_odds[judged] - log_odds[first[place[judged]]]
    verdict = np.sign(np.sign(both).sum(axis=1))
    right = (1 + verdict * (2 * labels[judged] - 1)) / 2
    return right, orders[judged] // 2


class BothOrders(Metric):
    """Metric that joins the two orders of comparisons across batches, and across processes under Lightning's strategies.

    Attributes:
        orders, log_odds, labels: of the examples so far; see `judge_both_orders`.
    """

    full_state_update = False
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
        self.log_odds.append(logits[..., 1] - logits[..., 0])
        self.labels.append(labels)

    def compute(self) -> dict[str, float]:
        """Return the accuracy, and the ends of its 95 % interval over comparisons; nothing without a whole comparison.

        The accuracy is NaN, without an interval, where a verdict is NaN. One comparison alone has no interval.
        """
        parts: list[Any] = [self.orders, self.log_odds, self.labels]
        # After an exchange between processes a state is one tensor.
        states = [torch.cat(part) if isinstance(part, list) else part for part in parts]
        right, comparisons = judge_both_orders(*(state.cpu().numpy() for state in states))
        if not len(right):
            return {}
        sort = np.argsort(
            comparisons, kind="stable"
        )  # draws follow their order, which is not that of one process
        low, high = bootstrap_interval(right[sort], comparisons[sort])
        found = {NAME: float(right.mean())}
        if not np.isnan([found[NAME], low]).any():
            found |= {f"{NAME}_low": low, f"{NAME}_high": high}
        return found


def stage_orders() -> nn.ModuleDict:
    """Return a metric for validation and one for testing."""
    return nn.ModuleDict({stage: BothOrders() for stage in ("val", "test")})


def add_orders(module: Any, stage: str, batch: Mapping[str, Any], logits: Tensor) -> None:
    """Add a batch with ``orders`` to the metric of ``module.both_orders``; an even number of selectors has no majority.

    ``logits`` are those of A and B by each of the U selectors, ``(batch, U, 2)``.
    """
    if "orders" in batch and logits.shape[1] % 2:
        metric = cast(BothOrders, module.both_orders[stage])
        metric.update(batch["orders"], logits, batch["labels"])


def drop_orders(module: Any, stage: str) -> None:
    """Drop the examples that an interrupted pass has left in the metric of ``module.both_orders``."""
    cast(BothOrders, module.both_orders[stage]).reset()


def log_both_orders(module: Any, stage: str) -> None:
    """Log the metric of ``module.both_orders`` at the end of a pass, as ``stage/accuracy_both_orders`` with its interval.

    Nothing is logged where no batch had ``orders``, or none of their comparisons came in both.
    """
    metric = cast(BothOrders, module.both_orders[stage])
    if metric.update_called:
        for name, value in metric.compute().items():
            module.log(f"{stage}/{name}", value)
        metric.reset()
