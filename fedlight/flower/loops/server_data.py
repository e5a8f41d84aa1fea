"""Data and clients of a server, which has no rows: what nodes have named, and a batch that is passed over."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fedlight.callbacks.loop.groups.refusals import OF_DATA
from fedlight.callbacks.loop.round_table import Record
from fedlight.callbacks.loop.run import NO_WORK, NoDevices, visit_row
from fedlight.federation.client import Client, Visit
from fedlight.flower.nodes import Nodes
from fedlight.flower.parts import has_rows_for_validation
from fedlight.support.torch_parts import replaced

ABSENT, DROPPED = "absent", "dropped"
"""Reasons in ``visits.csv`` of clients that are left out of a round."""
TAKES_BATCH = ("on_train_batch_start", "on_train_batch_end")
"""Hooks of a training batch."""


class PassedOver:
    """Batch that is never trained on."""


@contextmanager
def without_hooks(module: L.LightningModule) -> Iterator[None]:
    """Keep `PassedOver` from the hooks of a module while the body runs."""
    # Lightning warns about hooks of a transfer that a module has beside a datamodule.
    changed = [
        name for name in OF_DATA if getattr(type(module), name) is not getattr(L.LightningModule, name)
    ]
    with ExitStack() as stack:
        for name in (*TAKES_BATCH, *changed):
            hook = _hook(getattr(module, name), gives=name in OF_DATA)
            stack.enter_context(replaced(module, name, hook))
        yield


def _hook(original: Any, gives: bool) -> Any:
    def hook(*args: Any, **named: Any) -> Any:
        for value in (*args, *named.values()):
            if isinstance(value, PassedOver):
                return value if gives else None
        return original(*args, **named)  # a batch of validation

    return hook


class ServerData(L.LightningDataModule):
    """Data of a server, which has no rows: the clients that nodes have named, and its own validation rows.

    The loop is a `ServerLoop`, whose module imports this one. Of the datamodule of the config, ``inner``, the validation
    rows are read if they have a separate source.
    """

    def __init__(self, loop: Any, inner: L.LightningDataModule) -> None:
        super().__init__()
        self._loop, self._inner = loop, inner
        self._made: dict[str, int] = {}
        self.accumulation = 1
        self.validates = has_rows_for_validation(inner)

    @property
    def client_groups(self) -> Mapping[str, str] | None:
        """Known group of each client; None without."""
        return self._loop.nodes.groups or None

    def setup(self, stage: str) -> None:
        """Read the rows for validation."""
        if self.validates:
            self._inner.trainer = self.trainer  # which Lightning sets for the trainer's datamodule alone
            self._inner.setup("validate")

    def client_sizes(self) -> dict[str, int]:
        """Return with how many examples each client counts; 1 where the server need not know."""
        return self._loop.believe(self._loop.nodes.sizes)

    def num_batches(self, client_id: str, split: str = "train") -> int:
        """Return 1: how many batches a visit has is the node's."""
        return 1

    # Interface for fedlight.callbacks.loop.parts.dpsgd.DrawsByLot

    def draw_by_lot(self) -> None:
        """Do nothing: nodes draw the batches."""

    def passes(self, visit: Visit) -> int:
        """Return the most passes that a visit can begin: a pass has at least one batch."""
        return visit.num_batches

    def set_visits(self, visits: Sequence[Visit], round_idx: int) -> None:
        """Do nothing: nodes read the batches."""

    def train_dataloader(self) -> DataLoader:
        """Return as many batches as Lightning needs for an epoch, which are passed over."""
        return DataLoader([0.0] * self.accumulation, batch_size=1, collate_fn=lambda _: PassedOver())  # type: ignore[arg-type]

    def val_dataloader(self) -> Any:
        return self._inner.val_dataloader() if self.validates else []

    # Interface for algorithms whose clients make training data: fedlight.federation.protocols.SynthesizesData

    def synthesize(self, round_idx: int, client_ids: Sequence[str], module: torch.nn.Module) -> None:
        """Let the clients make candidates on their nodes."""
        self._made |= self._loop.prepare(round_idx, client_ids)

    def choose(self, client_id: str, module: torch.nn.Module) -> None:
        """Do nothing: nodes choose."""

    def num_synthetic(self, client_id: str) -> int:
        """Return how many examples a client keeps."""
        return self._made.get(client_id, 0)

    def synthesis_metrics(self) -> dict[str, float]:
        """Return nothing: counts stay with the nodes."""
        return {}

    def reset_synthesis(self) -> None:
        """Forget the numbers of examples that clients have made."""
        self._made = {}


class AwayClients(NoDevices):
    """Clients that cannot be asked in a round, as their node is not there."""

    def __init__(self, nodes: Nodes, forward_only: bool) -> None:
        super().__init__(forward_only)
        self._nodes = nodes
        self._without: dict[str, str] = {}
        self._away: list[Visit] = []

    def present(self, round_idx: int, now_seconds: float, clients: Sequence[Client]) -> list[Client]:
        there = {*chain.from_iterable(self._nodes.homes([client.id for client in clients]).values())}
        self._without = {client.id: ABSENT for client in clients if client.id not in there}
        return [client for client in clients if client.id in there]

    def drop(self, client_id: str, reason: str) -> None:
        """Leave a client out of the round that is planned."""
        self._without[client_id] = reason

    def admit(
        self, round_idx: int, now_seconds: float, visits: Sequence[Visit], parameters: Mapping[str, Tensor]
    ) -> list[Visit]:
        self._away = [visit for visit in visits if visit.client_id in self._without]
        return [visit for visit in visits if visit.client_id not in self._without]

    def dropouts(self, round_idx: int) -> list[Record]:
        names = dict.fromkeys(visit.client_id for visit in self._away)  # some would make several visits
        return [dropped_row(round_idx, name, self._without[name], 0) for name in names]


def dropped_row(
    round_idx: int, client_id: str, reason: str, bytes_down: int, lora_rank: int | None = None
) -> Record:
    """Return the row of a client that was asked and did not get through."""
    return visit_row(round_idx, Visit(client_id, 1), 0, NO_WORK, bytes_down, 0, reason, lora_rank)
