"""Data and clients of a server, which has no rows: what nodes have named, and a batch that is passed over."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fedlight.callbacks.loop.round_table import Record
from fedlight.callbacks.loop.run import NO_WORK, NoDevices, visit_row
from fedlight.federation.client import Client, Visit
from fedlight.flower.nodes import Nodes
from fedlight.flower.parts import has_rows_for_validation

ABSENT, DROPPED = "absent", "dropped"
"""Reasons in ``visits.csv`` of clients that are left out of a round."""
TAKES_BATCH = ("on_train_batch_start", "on_train_batch_end")
"""Hooks of a training batch."""
GIVES_BATCH = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""Hooks that return the batch which they get."""


class PassedOver:
    """Batch that nobody trains on."""

    @classmethod
    def collate(cls, examples: list[Any]) -> "PassedOver":
        """Return such a batch, as the loader's ``collate_fn``."""
        return cls()


@contextmanager
def without_hooks(module: L.LightningModule) -> Iterator[None]:
    """Keep `PassedOver` from the hooks of a module while the body runs."""
    # Lightning warns about hooks of a transfer that a module has beside a datamodule.
    own = [
        name for name in GIVES_BATCH if getattr(type(module), name) is not getattr(L.LightningModule, name)
    ]
    names = [*TAKES_BATCH, *own]
    before = {name: vars(module)[name] for name in names if name in vars(module)}
    for name in names:
        vars(module)[name] = _hook(getattr(module, name), gives=name in GIVES_BATCH)
    try:
        yield
    finally:
        for name in names:
            del vars(module)[name]
        vars(module).update(before)


def _hook(own: Any, gives: bool) -> Any:
    def hook(*args: Any, **named: Any) -> Any:
        passed = [one for one in (*args, *named.values()) if isinstance(one, PassedOver)]
        if passed:
            return passed[0] if gives else None
        return own(*args, **named)

    return hook


class ServerData(L.LightningDataModule):
    """Data of a server, which has no rows: the clients that nodes have named, and rows of its own to validate on.

    Args:
        nodes: the nodes.
        inner: datamodule of the config, whose validation rows are read if they have a source of their own.
        prepare: function that lets clients make candidates in a round; it returns how many each keeps.
        believe: function from the clients' claimed numbers of examples to those that count.
    """

    def __init__(
        self,
        nodes: Nodes,
        inner: L.LightningDataModule,
        prepare: Callable[[int, Sequence[str]], Mapping[str, int]],
        believe: Callable[[Mapping[str, int]], dict[str, int]],
    ) -> None:
        super().__init__()
        self._nodes, self._inner, self._prepare, self._believe = nodes, inner, prepare, believe
        self._made: dict[str, int] = {}
        self.accumulation = 1
        self.validates = has_rows_for_validation(inner)

    @property
    def client_groups(self) -> Mapping[str, str] | None:
        """Known group of each client; None without."""
        return self._nodes.groups or None

    def setup(self, stage: str) -> None:
        """Read the rows for validation."""
        if self.validates:
            self._inner.trainer = self.trainer
            self._inner.setup("validate")

    def client_sizes(self) -> dict[str, int]:
        """Return with how many examples each client counts; 1 where the server need not know."""
        return self._believe(self._nodes.sizes)

    def num_batches(self, client_id: str, split: str = "train") -> int:
        """Return 1: how many batches a visit has is the node's."""
        return 1

    def set_visits(self, visits: Sequence[Visit], round_idx: int) -> None:
        """Do nothing: nodes read the batches."""

    def train_dataloader(self) -> DataLoader:
        """Return as many batches as Lightning needs for an epoch, which are passed over."""
        return DataLoader([0.0] * self.accumulation, batch_size=1, collate_fn=PassedOver.collate)  # type: ignore[arg-type]

    def val_dataloader(self) -> Any:
        return self._inner.val_dataloader() if self.validates else []

    # Interface for algorithms whose clients make training data: fedlight.federation.protocols.SynthesizesData

    def synthesize(self, round_idx: int, client_ids: Sequence[str], module: torch.nn.Module) -> None:
        """Let the clients make candidates on their nodes."""
        self._made |= self._prepare(round_idx, client_ids)

    def choose(self, client_id: str, module: torch.nn.Module) -> None:
        """Do nothing: nodes choose."""

    def num_synthetic(self, client_id: str) -> int:
        """Return how many examples a client keeps."""
        return self._made.get(client_id, 0)

    def synthesis_metrics(self) -> dict[str, float]:
        """Return nothing: counts stay with the nodes."""
        return {}

    def reset_synthesis(self) -> None:
        """Forget what clients have made."""
        self._made = {}


class AwayClients(NoDevices):
    """Clients that cannot be asked in a round, as their node is not there.

    Args:
        nodes: the nodes.
        forward_only: see `NoDevices`.
    """

    def __init__(self, nodes: Nodes, forward_only: bool) -> None:
        super().__init__(forward_only)
        self._nodes = nodes
        self._without: dict[str, str] = {}
        self._away: list[Visit] = []

    def present(self, round_idx: int, now_seconds: float, clients: Sequence[Client]) -> list[Client]:
        there = {name for own in self._nodes.homes([one.id for one in clients]).values() for name in own}
        self._without = {one.id: ABSENT for one in clients if one.id not in there}
        return [one for one in clients if one.id in there]

    def drop(self, client_id: str, reason: str) -> None:
        """Leave a client out of the round that is planned."""
        self._without[client_id] = reason

    def admit(
        self, round_idx: int, now_seconds: float, visits: Sequence[Visit], parameters: Mapping[str, Tensor]
    ) -> list[Visit]:
        self._away = [one for one in visits if one.client_id in self._without]
        return [one for one in visits if one.client_id not in self._without]

    def dropouts(self, round_idx: int) -> list[Record]:
        reasons = {one.client_id: self._without[one.client_id] for one in self._away}
        return [dropped_row(round_idx, name, why, 0) for name, why in reasons.items()]


def dropped_row(round_idx: int, client_id: str, reason: str, bytes_down: int) -> Record:
    """Return the row of a client that was asked and did not get through."""
    return visit_row(round_idx, Visit(client_id, 1), 0, NO_WORK, bytes_down, 0, reason)
