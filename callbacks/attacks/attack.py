"""Attacks on a model while it is trained: when they run, on which parameters, and where it goes what they find.

What an attack does is said in its own file: :mod:`~fedlight.callbacks.attacks.memory_extraction`,
:mod:`~fedlight.callbacks.attacks.discoverable_memorization` and :mod:`~fedlight.callbacks.attacks.membership_inference`.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import lightning as L
import numpy as np
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng

from fedlight.callbacks.attacks.attack_needs import HoldsClientRows, TakesUploads
from fedlight.callbacks.attacks.attack_records import GLOBAL, AttackTable, remove_later, write_lines
from fedlight.callbacks.logs.trainer import log_now
from fedlight.callbacks.loop.round_table import Row
from fedlight.support.checks import refuse_below
from fedlight.support.files import refuse_unwritable

Target = Literal["global", "uploads"]


class Found(NamedTuple):
    """What one attack on one target has found.

    Attributes:
        metrics: numbers by name.
        records: everything that was seen, as plain values.
    """

    metrics: dict[str, float]
    records: list[dict[str, Any]]


class Attack(L.Callback, ABC):
    """Base of the attacks: subclasses say what they need in ``prepare`` and what they do in ``attack``.

    At the end of each n-th round (of each n-th epoch under a plain Trainer), and of the last one, the server's model is
    attacked, before it is validated; during these rounds each client's upload, as it comes. Training goes on as if nothing
    had been measured. Metrics are logged as ``attack/NAME/METRIC``, and as ``attack/NAME/uploads/METRIC`` their means over
    a round's uploads, at the number of optimizer steps made so far. ``OUTPUT/attacks.csv`` has them all
    (:class:`~fedlight.callbacks.attacks.attack_records.AttackTable`), ``OUTPUT/round_3/NAME.jsonl`` what was seen in the
    third round.

    Args:
        every_n_rounds: >= 1.
        before_training: attack the model as it is before training, too: round 0.
        targets: ``global``, ``uploads`` or both.
        seed: of all draws; the same examples and draws in every round.
        output: a folder; None: ``attacks`` in ``trainer.default_root_dir``.

    Raises:
        ValueError: a setting is out of range; in ``setup``, the module, the datamodule or the trainer lacks what is needed.
        OSError: the disk is full; in ``setup``, nothing can be written to the folder.
    """

    name: ClassVar[str]
    """Under which metrics are logged and files are written."""

    def __init__(
        self,
        every_n_rounds: int = 1,
        before_training: bool = False,
        targets: Sequence[Target] = ("global",),
        seed: int = 0,
        output: str | None = None,
    ) -> None:
        self.at_least_one(every_n_rounds=every_n_rounds)
        if not targets or set(targets) - {"global", "uploads"}:
            raise ValueError(
                f"{type(self).__name__}.targets={list(targets)} must name `global`, `uploads` or both, and nothing else"
            )
        self.every_n_rounds, self.before_training, self.targets = (
            every_n_rounds,
            before_training,
            tuple(targets),
        )
        self.seed, self.output = seed, output
        self._rounds_done = self._restored = 0
        self._before: str | None = None
        self._table: AttackTable | None = None
        self._uploads: dict[str, Found] = {}
        self._seen: Row | None = None

    @abstractmethod
    def prepare(self, data: HoldsClientRows, module: Any) -> None:
        """Takes what is needed of the data and refuses what cannot be attacked.

        Raises:
            ValueError: it cannot.
        """

    @abstractmethod
    def attack(self, module: Any, client: str | None) -> Found:
        """Attacks the module as it stands.

        Args:
            module: what was trained.
            client: whose rows are looked for; None: everybody's.
        """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Finds the loop and the clients' rows: what is missing comes out before any work."""
        if stage != "fit":
            return
        who = type(self).__name__
        if trainer.world_size > 1:
            raise ValueError(f"{who} asks its questions in one process: set devices=1 and num_nodes=1")
        data = trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, HoldsClientRows):
            raise ValueError(
                f"{who} needs a datamodule that knows the clients' rows, such as InstructionDataModule, not "
                f"{type(data).__name__}"
            )
        self._loop = self._behind_the_loop(trainer)
        if "uploads" in self.targets and (self._loop is None or GLOBAL in data.client_rows):
            raise ValueError(
                f"{who}.targets={list(self.targets)} needs uploads, and so a federated loop: add one, or name global alone"
                if self._loop is None
                else f"{who}.targets={list(self.targets)}: a client is called {GLOBAL!r}, as the server's model; rename it"
            )
        if trainer.current_epoch == 0:  # a checkpoint is loaded later
            self._rounds_done, self._before = 0, None
        self._folder = Path(self.output or Path(trainer.default_root_dir) / "attacks")
        self._table = AttackTable(self._folder / "attacks.csv", self.name)
        self.prepare(data, pl_module)
        refuse_unwritable(self._folder, f"{who}.output")

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Takes out of the table what will be measured again; a checkpoint is loaded by now."""
        if self._loop is not None:
            self._rounds_done = self._loop.rounds_done
        self._seen, self._uploads = None, {}
        assert self._table is not None
        self._table.restart(self._rounds_done, self._before if self._rounds_done == self._restored else None)
        remove_later(self._folder, f"{self.name}.jsonl", self._rounds_done)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.before_training and self._rounds_done == 0:
            self._finish(trainer, {GLOBAL: self._measure(pl_module, None)})

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Attacks the upload that has come, and the server's model where a round has ended.

        Not in ``on_train_epoch_end``: a checkpoint may be taken before that, and a run that goes on from there would lack
        the round.
        """
        if "uploads" in self.targets and self._is_due(trainer, self._rounds_done + 1):
            self._attack_upload(pl_module)
        done = self._loop.rounds_done if self._loop else trainer.current_epoch + trainer.is_last_batch
        if done > self._rounds_done:
            self._rounds_done = done
            if self._is_due(trainer, done):
                everybody = {GLOBAL: self._measure(pl_module, None)} if "global" in self.targets else {}
                self._finish(trainer, {**self._uploads, **everybody})
            self._uploads = {}

    def state_dict(self) -> dict[str, Any]:
        """Rounds that are over, and a digest of what was found in them."""
        before = self._table.digest(self._rounds_done) if self._table is not None else None
        return {"rounds_done": self._rounds_done, "before": before}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._rounds_done = self._restored = state_dict["rounds_done"]
        self._before = state_dict.get("before")

    def at_least_one(self, **settings: int) -> None:
        """Refuses settings below 1.

        Raises:
            ValueError: one is.
        """
        refuse_below(1, f"{type(self).__name__}.", **settings)

    def _behind_the_loop(self, trainer: L.Trainer) -> TakesUploads | None:
        """The loop, if there is one; Lightning calls it first from now on, or an upload would be seen a batch too late."""
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        loop = next((one for one in callbacks if isinstance(one, TakesUploads)), None)
        if isinstance(loop, L.Callback) and callbacks.index(loop) > callbacks.index(self):
            # In a new list: Lightning is going through the old one. The command line puts the loop behind all others.
            others = [one for one in callbacks if one is not self]
            at = others.index(loop) + 1
            trainer.callbacks = [*others[:at], self, *others[at:]]  # type: ignore[attr-defined]
        return loop

    def _is_due(self, trainer: L.Trainer, round_number: int) -> bool:
        return round_number % self.every_n_rounds == 0 or round_number == trainer.max_epochs

    def _attack_upload(self, module: L.LightningModule) -> None:
        """Where a visit has just ended and has given one."""
        if self._loop is None or not self._loop.visit_records or self._loop.visit_records[-1] is self._seen:
            return
        self._seen = self._loop.visit_records[-1]
        upload = self._loop.upload
        if upload is not None and upload.client_id == self._seen["client"]:
            with self._loop.holding(upload.state):
                self._uploads[upload.client_id] = self._measure(module, upload.client_id)

    def _measure(self, module: L.LightningModule, client: str | None) -> Found:
        start = time.perf_counter()
        with isolate_rng():
            found = self.attack(module, client)
        shown = "  ".join(f"{name} {value:.4g}" for name, value in found.metrics.items())
        whose = f"after round {self._rounds_done}" if client is None else f"on the upload of {client}"
        rank_zero_info(f"{self.name} {whose}: {shown}  ({time.perf_counter() - start:.1f} s)")
        return found

    def _finish(self, trainer: L.Trainer, found: Mapping[str, Found]) -> None:
        """Writes and logs what was found in a round, by target."""
        if not found:
            return
        lines = [{"target": target, **record} for target, one in found.items() for record in one.records]
        write_lines(self._folder / f"round_{self._rounds_done}" / f"{self.name}.jsonl", lines)
        assert self._table is not None
        self._table.put(self._rounds_done, {target: one.metrics for target, one in found.items()})
        uploads = [one.metrics for target, one in found.items() if target != GLOBAL]
        metrics = {
            f"attack/{self.name}/uploads/{name}": value for name, value in mean_metrics(uploads).items()
        }
        if GLOBAL in found:
            metrics |= {f"attack/{self.name}/{name}": value for name, value in found[GLOBAL].metrics.items()}
        log_now(trainer, metrics)


def mean_metrics(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over those that have it.

    Example:
        >>> mean_metrics([{"exact": 0.5}, {"exact": 1.0, "canaries": 1.0}])
        {'exact': 0.75, 'canaries': 1.0}
    """
    names = dict.fromkeys(name for metrics in each for name in metrics)
    return {name: float(np.mean([metrics[name] for metrics in each if name in metrics])) for name in names}
