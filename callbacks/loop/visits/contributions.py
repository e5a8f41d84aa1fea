"""Contributions of a round's clients, updates and training metrics, summed over the visits of all processes."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, Protocol, runtime_checkable

import lightning as L

from fedlight.callbacks.loop.parts.buffers import BufferPolicy, Buffers
from fedlight.callbacks.loop.plan import RoundSchedule
from fedlight.federation.aggregation import Aggregation, pieces_of
from fedlight.federation.client import Update, Visit
from fedlight.federation.state import Diverged, State

logger = logging.getLogger("fedlight")


class Contributions:
    """Contributions of a round's clients, each as a whole.

    Attributes:
        aggregation: combination of their updates.
        diverged: client that is left out -> the reason.

    Args:
        schedule: visits of this process.
        clients: clients with visits in any process.
    """

    def __init__(
        self,
        round_idx: int,
        aggregation: Aggregation,
        buffers: BufferPolicy,
        schedule: RoundSchedule,
        clients: Sequence[str],
    ) -> None:
        self.diverged: dict[str, str] = {}
        self._clients = clients
        self._round_idx = round_idx
        self.aggregation = aggregation
        self._buffers = buffers
        self._schedule = schedule
        self._waiting: dict[str, list[tuple[Update, Buffers, int]]] = {}

    def refuse_left_out(self, client_id: str) -> None:
        """Raise `Diverged` for a client with an earlier visit in the round that diverged."""
        if client_id in self.diverged:
            raise Diverged(self.diverged[client_id])

    def add(self, visit: Visit, update: Update | None, buffers: Buffers, num_examples: int) -> None:
        """Add a visit's update and buffers; they count once the client's last visit of the round is done."""
        if update is not None:
            self._waiting.setdefault(visit.client_id, []).append((update, buffers, num_examples))
        # A later visit may still diverge, and then none of the client counts.
        if self._schedule.is_last(visit):
            for each, changed, examples in self._waiting.pop(visit.client_id, []):
                self.aggregation.add(each)
                self._buffers.add(changed, examples)

    def leave_out(self, client_id: str, error: Diverged) -> None:
        """Leave a client out of the round, with the updates of all its visits."""
        self.diverged.setdefault(client_id, str(error))
        self._waiting.pop(client_id, None)

    def pieces(self) -> Iterator[dict[str, Any]]:
        """Start anew, and return the contributions in this process so far in pieces, as tensors and plain values."""
        diverged, self.diverged = self.diverged, {}
        updates = enumerate(pieces_of(self.aggregation))
        return ({"updates": update, "diverged": {} if number else diverged} for number, update in updates)

    def merge(self, partials: Sequence[Mapping[str, Any]]) -> None:
        """Add `pieces` of any of the processes."""
        diverged = dict(self.diverged)
        for partial in partials:
            self.aggregation.merge(partial["updates"])
            diverged |= partial["diverged"]
        # In the order of the plan, whatever the order of the processes.
        self.diverged = {name: diverged[name] for name in self._clients if name in diverged}

    def result(self, hints: Mapping[str, object]) -> State:
        """Return the combined update of the remaining clients; name the others and the settings in ``hints`` in a warning.

        Raises ValueError if all clients have diverged.
        """
        if self.diverged:
            clients = self._clients
            client_id, first = next(iter(self.diverged.items()))
            settings = ", ".join(f"{name}={value}" for name, value in hints.items())
            reason = f"NaN or Inf in what they trained; {client_id}: {first}"
            remedy = (
                f"With {settings}: lower the learning rate, or set trainer.gradient_clip_val to 1.0 or less"
            )
            if len(self.diverged) == len(clients):
                raise ValueError(
                    f"round {self._round_idx + 1}: all {len(clients)} clients diverged ({reason}), so the run ends with "
                    f"the global model of the round before. {remedy}"
                )
            logger.warning(
                "round %s: %s of %s clients diverged and are left out: %s (%s). %s",
                *(
                    self._round_idx + 1,
                    len(self.diverged),
                    len(clients),
                    ", ".join(self.diverged),
                    reason,
                    remedy,
                ),
            )
        return self.aggregation.result()


@runtime_checkable
class SumsTraining(Protocol):
    """LightningModule that can sum its training metrics over visits, so that nothing is read from the device by batch."""

    def sum_training(self) -> None:
        """Sum the metrics of training batches until `training_sums`, instead of logging each batch."""

    def training_sums(self) -> list[Mapping[str, tuple[float, int]]]:
        """Return sum and number of examples of each metric since `sum_training`, client after client."""


class TrainingMetrics:
    """Training metrics of a round, from modules that sum them over each visit.

    Attributes:
        visits: client id -> metrics of each of its visits: name -> sum over examples and their number.
    """

    def __init__(self) -> None:
        self.visits: dict[str, list[Mapping[str, tuple[float, int]]]] = {}

    def start(self, module: L.LightningModule) -> None:
        """Let the module sum the metrics of the visits that begin."""
        if isinstance(module, SumsTraining):
            module.sum_training()

    def take(self, module: L.LightningModule, num_visits: int) -> list[Mapping[str, tuple[float, int]]]:
        """Return the metrics of each visit that is over, empty ones where the module has none."""
        sums = module.training_sums() if isinstance(module, SumsTraining) else []
        return sums or [{}] * num_visits

    def add(self, client_id: str, metrics: Mapping[str, tuple[float, int]]) -> None:
        """Add the metrics of a visit."""
        if metrics:
            self.visits.setdefault(client_id, []).append(metrics)

    def leave_out(self, client_id: str) -> None:
        """Forget the visits of a client that diverged."""
        self.visits.pop(client_id, None)

    def partial(self) -> dict[str, list[Mapping[str, tuple[float, int]]]]:
        """Return the metrics of this process's visits, and start anew."""
        visits, self.visits = self.visits, {}
        return visits

    def merge(self, partials: Sequence[Mapping[str, list[Mapping[str, tuple[float, int]]]]]) -> None:
        """Add the `partial` of all processes, each of different clients."""
        for partial in partials:
            self.visits |= partial

    def means(self, reported: bool = False) -> dict[str, float]:
        """Return the mean of each metric over the examples of all visits.

        Where clients that may lie have ``reported`` it, the median of the visits' means.
        """
        parts: dict[str, list[tuple[float, int]]] = {}
        for metrics in (metrics for visits in self.visits.values() for metrics in visits):
            for name, part in metrics.items():
                parts.setdefault(name, []).append(part)
        if reported:
            return {name: median(total / count for total, count in each) for name, each in parts.items()}
        return {
            # fsum: the order of the visits changes no bit.
            name: math.fsum(total for total, _ in each) / sum(count for _, count in each)
            for name, each in parts.items()
        }
