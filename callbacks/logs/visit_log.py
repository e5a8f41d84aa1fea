"""Table of visits: one CSV row for each visit of a federated run, in the order of their ends.

A killed and resumed run leaves the same file as an uninterrupted one (`fedlight.callbacks.loop.round_table`).
"""

from typing import Any, Protocol, runtime_checkable

import lightning as L
from lightning.pytorch.utilities import rank_zero_info

from fedlight.callbacks.logs.trainer import find_callback
from fedlight.callbacks.loop.round_table import Record, RoundLog


@runtime_checkable
class RecordsVisits(Protocol):
    """Federated loop with records of its visits."""

    # finished visits of the current round, cleared when the next one starts; plain values, the same keys in each,
    # among them ``round``
    visit_records: list[Record]
    # number of rounds with a finished server step; after a resume, the first round to be trained again
    rounds_done: int


class VisitLog(RoundLog):
    """Lightning callback that writes ``visits.csv``; without a federated loop it says so and writes nothing.

    With a fleet, a row holds the costs of the visit on the client's device, and each client that dropped out has a row;
    `RoundProgress` prints the sums at the end of a run. A file of an earlier run is replaced, unless that run is resumed.

    Args:
        path: the file; None: ``visits.csv`` in the trainer's ``default_root_dir``.
    """

    log_name = "visits.csv"

    def __init__(self, path: str | None = None) -> None:
        super().__init__(path)
        self._loop: RecordsVisits | None = None
        self._restored: list[Record] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        loop: RecordsVisits | None = find_callback(trainer, RecordsVisits)
        self._loop = loop if trainer.is_global_zero else None  # one process writes
        if stage == "fit" and loop is None:
            rank_zero_info("VisitLog: no FederatedLoop among the callbacks, so there are no visits to log")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._loop is not None:
            super().on_train_start(trainer, pl_module)
            self._table.append(self._restored)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Of a round that ``max_time`` has cut no visit counts.
        if self._loop is not None and self._loop.rounds_done > trainer.current_epoch:
            self._table.append(self._loop.visit_records)

    def visit_rows(self) -> list[dict[str, str]]:
        """Return all visits of the run so far as text; empty without a federated loop."""
        return self._table.rows() if self._loop is not None else []

    def state_dict(self) -> dict[str, Any]:
        """Return the rows of the last finished round as well, which may not be in the file yet."""
        # A checkpoint that is taken after validation comes before the log has written the rows.
        records = [dict(record) for record in self._loop.visit_records] if self._loop is not None else []
        is_written = bool(records) and records[0]["round"] == self._table.last_round
        # The rows come again with the records, so the file counts without them.
        return (self._table.state_before if is_written else super().state_dict()) | {"records": records}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._restored = state_dict.get("records", [])
